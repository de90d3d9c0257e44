"""Toy configurations of model families, for tests of both sides. Data only; what is true of a family is found by running it."""

from __future__ import annotations

UNKNOWN = {"nemotron_h": "NemotronHForCausalLM"}


def register() -> None:
    """transformers 4 does not know these families; their code comes with their checkpoints. Bridge asks of it only what
    its class is called."""
    from transformers import AutoConfig, PretrainedConfig

    for kind, architecture in UNKNOWN.items():
        names = {"model_type": kind, "auto_map": {"AutoModelForCausalLM": f"modeling_{kind}.{architecture}"}}
        AutoConfig.register(kind, type(f"{kind}_config", (PretrainedConfig,), names), exist_ok=True)
