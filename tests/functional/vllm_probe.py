"""What tests ask of a live vLLM worker, by method name (`worker_extension_cls`). Arguments and answers are plain
data."""

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support import worker_probe
from tests.support.engine_bytes import checksum_kept, scramble
from tests.support.replay import load
from xfer.engines.hf_spec import checkpoint_specs
from xfer.engines.live import common, union
from xfer.engines.vllm_layout import EngineModel
from xfer.errors import XferError
from xfer.plan.intervals import difference, size
from xfer.trace.catalog import Catalog


class Probe(worker_probe.Probe):
    """Mixed into vLLM's worker: `self` is the worker."""

    def xfer_read(self, folder, leave=(), extra=(), keep=()):
        """Read the layout for the checkpoint in `folder` without the names in `leave`; errors come back as text."""
        from xfer.trace.fragment import TensorSpec

        specs = [s for s in checkpoint_specs(folder) if s.name not in leave] + [
            TensorSpec(n, (4,), "bfloat16") for n in extra
        ]
        self.xfer = EngineModel(self.vllm_config, self.model_runner.get_model(), self.device, keep=keep)
        try:
            layout = self.xfer.read(Catalog(tuple(sorted(specs))))
        except XferError as e:
            return {"error": type(e).__name__, "message": e.message, "violations": list(e.violations)}
        return {
            "error": "",
            "roots": {r.name: r.nbytes for r in layout.roots},
            "footprint": layout.bytes_of(layout.footprint),
            "kept": sorted({k.reason for k in layout.kept}),
            "kept_bytes": layout.bytes_of(layout.kept),
            "aliases": [list(a) for a in layout.aliases],
            "fragments": len(layout.traced.fragments),
            "reads": list(layout.traced.reads),
        }

    def xfer_live_bytes(self):
        """Bytes of all distinct storages of parameters and buffers, counted without xfer; and the empty parameters."""
        model = self.model_runner.get_model()
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in tensors if t.numel()}
        return sum(seen.values()), [n for n, p in model.named_parameters() if not p.numel()]

    def xfer_differs(self, folder):
        """Roots with a byte that is neither kept nor what the traced loader makes of the checkpoint."""
        layout = self.xfer.layout
        fresh = {n: torch.zeros_like(t) for n, t in layout.tensors.items()}
        load(layout.traced, load_file(f"{folder}/model.safetensors"), fresh)
        bad = []
        for root in layout.roots:
            wrong = torch.nonzero(self.xfer.tensors[root.name] != fresh[root.name]).flatten().numpy()
            judged = difference(_spans(layout.footprint, root.name), _spans(layout.kept, root.name))
            if size(common(judged, union([(wrong, wrong + 1)]))):
                bad.append(root.name)
        return bad

    def xfer_load(self, folder):
        """Write the checkpoint into live storage by the layout alone, as a refit would."""
        layout = self.xfer.layout
        load(layout.traced, load_file(f"{folder}/model.safetensors"), self.xfer.tensors)

    def xfer_scramble(self, seed):
        scramble(self.xfer, seed)

    def xfer_kept(self):
        return checksum_kept(self.xfer)

    def xfer_call(self, method, *args):
        out = getattr(self.xfer, method)(*args)
        return out if isinstance(out, str | int | None) else True

    def xfer_move_norm(self):
        """Another storage for one parameter, as a framework that reallocates would leave it."""
        p = next(p for n, p in self.model_runner.get_model().named_parameters() if p.dim() == 1)
        p.data = p.data.clone()

    def xfer_worker_rank(self):
        return self.weight_transfer_engine.worker_rank(), type(self.weight_transfer_engine).__name__


def _spans(spans, root):
    own = [(s.start, s.stop) for s in spans if s.root == root]
    return union([(np.array([a]), np.array([b])) for a, b in own])
