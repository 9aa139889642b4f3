"""transformers beside our whole-model rows: the same shape with drawn weights, its own cache, its own loop."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch

from agentkv.bench.device_times import host_time
from agentkv.bench.shapes import SHAPES

CHUNK = 2048


def transformers_run(name: str, num_rows: int, length: int, device: torch.device, steps: int = 4) -> dict[str, Any]:
    """Prompts of `length` drawn tokens in chunks of CHUNK, all rows together, then one new token a row: microseconds of the
    whole prefill and of each decode step but the first. sdpa, eager, DynamicCache; bfloat16, float32 on a CPU."""
    import transformers

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    given = {key: value for key, value in SHAPES[name].items() if key not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(SHAPES[name]["model_type"], **given)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    cache = transformers.DynamicCache()
    generator = torch.Generator(device).manual_seed(0)

    @torch.inference_mode()
    def feed(count: int) -> None:
        ids = torch.randint(0, config.vocab_size, (num_rows, count), device=device, generator=generator)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    chunk = min(CHUNK, length // 2)
    prefill = sum(host_time(lambda: feed(chunk), device) for _ in range(length // chunk))
    decode = [host_time(lambda: feed(1), device) for _ in range(steps)][1:]
    rate = num_rows * (length // chunk) * chunk / prefill * 1e6
    version = f"transformers {transformers.__version__}"
    return {"name": version, "prefill_us": prefill, "prefill_tokens_per_s": rate, "decode_us": decode}
