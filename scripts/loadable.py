"""Load a draft with the engine's own code, one weight at a time: what it would drop, what it would never fill.

SGLang skips weights that it does not know and never misses those it lacks (sglang/srt/models/llama_eagle3.py): a draft with
a renamed layer is served with a random one, in silence.  A process of its own, since the engine is not made to be a guest.
"""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from sglang_server import device
from stage import CHILD


def wrong_in(directory):
    """[what is wrong with a draft in SGLang's layout] by the SGLang of this machine, or why (str) it could not be asked."""
    env = {**os.environ, **({"SGLANG_USE_CPU_ENGINE": "1"} if device() == "cpu" else {})}
    asked = subprocess.run([*CHILD, sys.executable, __file__, str(directory)], capture_output=True, text=True, env=env)
    if asked.returncode:
        return "could not be run: " + (asked.stderr.strip().splitlines() or ["no answer"])[-1][:100]
    return json.loads(asked.stdout.splitlines()[-1])


def look(directory):
    import torch
    from safetensors.torch import load_file
    from sglang.srt.models import llama_eagle3 as engine
    from sglang.srt.runtime_context import get_context, get_parallel
    from transformers import AutoConfig

    config, wrong, alone = AutoConfig.from_pretrained(directory), [], SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
    engine.get_pp_group = lambda: alone  # where 0.5.16 looks for it
    one = {f"{name}_{what}": value for name in ("tp", "pp", "attn_tp", "attn_dp", "attn_cp") for what, value in (("rank", 0), ("size", 1))}
    with get_context().override_server_args(), get_parallel().override(**one, pp_group=alone), torch.no_grad():
        draft = engine.LlamaForCausalLMEagle3(config).float()
        own = {name: p.fill_(float("nan")) for name, p in draft.named_parameters() if "embed_tokens" not in name}  # the target's
        empty = {name: p.numel() for name, p in own.items()}
        for name, value in sorted(load_file(directory / "model.safetensors").items()):
            if "embed_tokens" in name or name == "t2d":
                continue
            try:
                draft.load_weights([(name, value.float() if value.is_floating_point() else value)])
            except (RuntimeError, AssertionError, ValueError) as error:
                wrong.append(f"{name} {list(value.shape)} does not fit ({' '.join(str(error).split())[:100]})")
                continue
            left = {n: int(p.isnan().sum()) for n, p in own.items()}
            if name != "d2t" and left == empty:
                wrong.append(f"{name} {list(value.shape)} would be dropped")
            empty = left
    return wrong + [f"{name} {list(p.shape)} would stay unfilled" for name, p in own.items()  # but for rows that fill a vocabulary up
                    if p[:config.draft_vocab_size if name == "lm_head.weight" else None].isnan().any()]


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
