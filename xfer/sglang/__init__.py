"""SGLang as an engine: `xfer.serve(SGLangServer("http://host:port"), ...)` or `xfer.serve(SGLangEngine(engine), ...)`.

The package adds an engine as docs/extending.md describes, and edits nothing of xfer: `plugin` and `worker` run in SGLang's
scheduler processes, `layout` and `meta` read the live model, `engines` calls an engine from its owner's process. SGLang is
imported when a function is called. docs/sglang.md says what was tested.
"""

from xfer.sglang.engines import SGLangEngine, SGLangServer

__all__ = ["SGLangEngine", "SGLangServer"]
