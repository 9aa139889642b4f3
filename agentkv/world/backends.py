"""Which of torch's attention kernels this machine trains with: measured for speed, and checked where a mask is given."""

from __future__ import annotations

import json
import time

import torch
from torch.nn import functional as F

from agentkv.world.micro_model import visible


def faster_attention() -> None:
    """Leave on only the attention backend that is faster here."""
    times: dict[str, float] = {}
    q = torch.randn(16, 6, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    switches = {"flash": torch.backends.cuda.enable_flash_sdp, "cudnn": torch.backends.cuda.enable_cudnn_sdp}
    for name in switches:
        for other, switch in switches.items():
            switch(other == name)
        try:
            for _ in range(2):
                torch.autograd.backward(F.scaled_dot_product_attention(q, q, q, is_causal=True).sum())
            torch.cuda.synchronize()
            began = time.monotonic()
            for _ in range(4):
                torch.autograd.backward(F.scaled_dot_product_attention(q, q, q, is_causal=True).sum())
            torch.cuda.synchronize()
            times[name] = time.monotonic() - began
        except RuntimeError as error:
            print(json.dumps({"attention": name, "error": str(error)[:200]}), flush=True)
    best = min(times, key=lambda name: times[name], default="flash")
    for other, switch in switches.items():
        switch(other == best)
    print(json.dumps({"attention": best, "seconds": times}), flush=True)


def check_masked_attention() -> None:
    """Attention with a mask must equal the plain formula here, whatever backend takes the call."""
    q, k, v = (torch.randn(2, 6, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gone = torch.randint(1, 512, (2, 512), device="cuda") + torch.arange(512, device="cuda")
    seen = visible(gone)
    scores = (q.float() @ k.float().mT / 8).masked_fill(~seen, float("-inf"))
    want = torch.autograd.grad((scores.softmax(-1) @ v.float()).square().sum(), (q, k, v))
    for attempt in range(2):
        try:
            got = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, seen).float().square().sum(), (q, k, v))
            apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, want, strict=True))
        except RuntimeError as error:
            print(json.dumps({"masked": str(error)[:200]}), flush=True)
            apart = 1.0
        print(json.dumps({"masked attention": "relative error of gradients", "value": apart}), flush=True)
        if apart < 0.05:
            return
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(True)
        if attempt:
            raise RuntimeError("attention with a mask is wrong on this machine: train with --no-prune")
