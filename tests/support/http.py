"""HTTP servers on loopback that answer as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def serving(*answers: Callable, port: int = 0, heads: list | None = None) -> Iterator[list[str]]:
    """Yields the URLs of a server for each function `answer(method, path, body)`, which returns (code, text or data for JSON). `heads`
    gets the headers of each request."""

    def handler(answer: Callable) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def respond(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                if heads is not None:
                    heads.append(self.headers)
                code, said = answer(self.command, self.path, body)
                data = (said if isinstance(said, str) else json.dumps(said)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_CONNECT = respond

            def log_message(self, *_):
                pass

        return Handler

    with ExitStack() as ends:
        servers = [ends.enter_context(ThreadingHTTPServer(("127.0.0.1", port), handler(a))) for a in answers]
        for server in servers:
            Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            ends.callback(server.shutdown)
        yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
