"""Methods that GPU tests call on a live vLLM worker (`worker_extension_cls`). Arguments and answers are plain data. The live model is
compared with a second one of the same class in the worker, which vLLM's loader has filled.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterable, Iterator

import torch

from benchmarks.lib.gpu_profile import Profile
from examples.common import toy
from tests.support import block_fp8, engine_bytes
from tests.support.gpu_watch import Watch
from xfer.direct.worker import DirectWorker
from xfer.engines.processed import read_processed
from xfer.kernels.block_fp8 import ScaleRule, TorchQuantizer, WeightBox, grid

DERIVED = ("W_UV", "W_UK_T")


def derived(model) -> dict[str, torch.Tensor]:
    """Tensors that MLA's attention layers compute from their projections after loading."""
    made = {f"{at}.{key}": getattr(module, key, None) for at, module in model.named_modules() for key in DERIVED}
    return {name: t for name, t in made.items() if t is not None}


def tensors(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | derived(model)


class Probe:
    """Mixed into vLLM's worker: `self` is the worker."""

    def xfer_wrong(self, config=None, seed=0, folder=""):
        """[(name, wrong elements, elements)] of live parameters and tensors derived from them that differ from vLLM's loader."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

        from xfer.engines.meta_model import make_model

        twin = make_model(self.vllm_config, str(self.device))
        for p in twin.parameters():
            p.data.zero_()  # vLLM's own padding rows are zero in a model that was loaded; so must ours be
        if folder:
            from safetensors import safe_open

            with safe_open(f"{folder}/model.safetensors", "pt", device=str(self.device)) as f:
                twin.load_weights(self.xfer_serialized((n, f.get_tensor(n)) for n in f.keys()))
        else:
            made = ((n, toy.tensor(n, s, d, seed, self.device)) for n, s, d in toy.specs(config))
            twin.load_weights(self.xfer_serialized(made))
        for module in twin.modules():
            if hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading"):  # MLA's attention
                module.process_weights_after_loading(self.vllm_config.model_config.dtype)
            if isinstance(method := getattr(module, "quant_method", None), BaseKVCacheMethod):
                method.process_weights_after_loading(module)  # makes buffers of its parameters
        for r in read_processed(self.model_runner.get_model()).relaid:
            module = twin.get_submodule(r.name)
            with set_current_vllm_config(self.vllm_config, check_compile=False):
                module.quant_method.process_weights_after_loading(module)
        live, bad, seen = tensors(self.model_runner.get_model()), [], 0
        assert bool(derived(twin)) == self.vllm_config.model_config.use_mla
        for name, want in tensors(twin).items():
            got = live.pop(name)
            a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (got, want))
            seen += a.numel()
            if a.shape != b.shape or not torch.equal(a, b):
                bad.append((name, int((a != b).sum()) if a.shape == b.shape else -1, got.numel()))
        del twin, module, want, a, b
        gc.collect()  # a model's modules refer to each other
        torch.cuda.empty_cache()
        return [*bad, *((n, -1, 0) for n in live)], seen

    def xfer_serialized(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint as a block FP8 engine loads it: what this engine asks for in FP8, quantized unless it is, with its scales. Large
        models by the torch twin of the trainers' kernel, toys by an oracle in numpy."""
        session = self.weight_transfer_engine.session
        if isinstance(session.side, DirectWorker):
            rules = {s.of: s.rule for s in session._catalog.specs if s.of}
        else:  # packed route: the worker quantizes
            rules = dict.fromkeys(session.side.loader._scales, session.side.loader._rule)
        for name, tensor in tensors:
            if name not in rules or tensor.dtype is torch.float8_e4m3fn:
                yield name, tensor
                continue
            rule = ScaleRule(rules[name])
            if tensor.numel() < 1 << 20:
                codes, scales, _ = block_fp8.quantized(tensor.float().cpu().numpy(), rule)
                values = torch.from_numpy(codes).to(self.device).view(torch.float8_e4m3fn)
                scales = torch.from_numpy(scales.copy()).to(self.device)
            else:
                values = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
                scales = torch.empty(grid(tensor.shape), device=self.device)
                TorchQuantizer([WeightBox(tensor, values, scales)], rule).run()
            yield name, values
            yield f"{name}_scale_inv", scales

    def xfer_scramble(self, seed):
        """Fills every live byte that a refit must write with noise. Returns a checksum of the kept bytes."""
        session = self.weight_transfer_engine.session
        if isinstance(session.side, DirectWorker):
            engine_bytes.scramble(session.adapter, seed)
        else:  # packed route: the engine's own loader writes every parameter
            noise = torch.Generator(self.device).manual_seed(seed)
            for p in self.model_runner.get_model().parameters():
                p.data.view(-1).view(torch.uint8).random_(0, 256, generator=noise)
        torch.cuda.synchronize()
        return self.xfer_kept()

    def xfer_names(self):
        return list(tensors(self.model_runner.get_model()))

    def xfer_noise(self, name: str, there: bool):
        """Fills one live tensor with finite noise, or restores it."""
        t = tensors(self.model_runner.get_model())[name].data
        if there:
            self.xfer_saved = t.clone()
            noise = torch.Generator(self.device).manual_seed(7)
            if t.dtype is torch.float8_e4m3fn:
                t.view(torch.uint8).random_(0, 0x7F, generator=noise)  # positive and finite
            else:
                t.normal_(generator=noise)
        else:
            t.copy_(self.xfer_saved)
        if t.is_cuda:
            torch.cuda.synchronize()

    def xfer_kept(self):
        session = self.weight_transfer_engine.session
        return engine_bytes.checksum_kept(session.adapter) if isinstance(session.side, DirectWorker) else ""

    def xfer_digests(self):
        """SHA-256 of the bytes of every live parameter."""
        live = tensors(self.model_runner.get_model())
        raw = {n: t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy() for n, t in live.items()}
        return {n: hashlib.sha256(x.tobytes()).hexdigest() for n, x in raw.items()}

    def xfer_layerwise(self):
        """Whether packed refits go through vLLM's layer-wise reload."""
        return self.weight_transfer_engine.session.side.loader._layerwise

    def xfer_nothing(self, seconds: float):
        time.sleep(seconds)

    def xfer_watch(self):
        self.xfer_watch_ = Watch(self.device)
        self.xfer_watch_.begin()

    def xfer_unwatch(self):
        return self.xfer_watch_.end()

    def xfer_profile(self):
        self.xfer_profile_ = Profile(self.device)
        self.xfer_profile_.begin()

    def xfer_unprofile(self, path: str):
        return self.xfer_profile_.end(path)

    def xfer_memory(self):
        """Bytes: of the device beside torch's allocator, and allocated by it."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
