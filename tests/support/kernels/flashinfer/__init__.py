"""Stands in for FlashInfer's kernel for experts, where FlashInfer is not installed: as much of the package as vLLM looks at."""

fp4_quantize = nvfp4_block_scale_interleave = None
