"""What functional tests ask of a live vLLM worker beside xfer's own calls (`worker_extension_cls`), by method name."""

import time
from contextlib import suppress

from tests.support import engine_bytes, memory


class Probe:
    """Mixed into vLLM's worker: `self` is the worker."""

    def xfer_scramble(self, seed):
        """Noise in every live byte that no refit may leave out. Answers a checksum of what is kept."""
        model = self.weight_transfer_engine.session.adapter
        engine_bytes.scramble(model, seed)
        return engine_bytes.checksum_kept(model)

    def xfer_kept(self):
        return engine_bytes.checksum_kept(self.weight_transfer_engine.session.adapter)

    def xfer_computed(self):
        """Tokens that this worker was given to compute since the last call, which was the first one if it is."""
        if "execute_model" not in vars(self):
            execute = self.execute_model

            def counted(scheduled, *args, **more):
                self._computed += scheduled.total_num_scheduled_tokens
                return execute(scheduled, *args, **more)

            self.execute_model, self._computed = counted, 0
        computed, self._computed = self._computed, 0
        return computed

    def xfer_slow(self, until_gone, steps):
        """After so many steps each one takes a quarter of a second, and writes into this file, until it is gone. The engine answers calls
        in between."""
        execute, left = self.execute_model, steps

        def slowly(scheduled, *args, **more):
            nonlocal left
            left -= 1
            with suppress(FileNotFoundError):
                if left < 0:
                    with open(until_gone, "r+") as file:
                        file.write("slow")
                    time.sleep(0.25)
            return execute(scheduled, *args, **more)

        self.execute_model = slowly

    def xfer_echo(self, number):
        """The number and the worker's rank, which tell this call's answers from those of another call."""
        return [number, self.weight_transfer_engine.worker_rank()]

    def xfer_forget_peak(self):
        self._resident = memory.forget_peak()

    def xfer_grown(self):
        """Bytes by which this worker's peak memory grew since `xfer_forget_peak`."""
        return memory.grown(self._resident)
