"""Load drafts with the engine's own code, one weight at a time: what it would drop, what it would never fill.

Example
    python scripts/loadable.py runs/try/base/04_train/sglang

SGLang skips weights that it does not know and never misses those it lacks (sglang/srt/models/llama_eagle3.py): a draft with
a renamed layer serves with a random one, in silence.  Prints {directory: [what is wrong]} as JSON; tried with 0.5.23.

Reads   directories in SGLang's layout
Writes  nothing
"""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import stage
from sglang_server import PATCHES, device


def wrong_in(*directories):
    """{directory: [sentence, ...]} as this machine's SGLang loads them, or the reason (str) why it could not be asked."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PATCHES), os.environ.get("PYTHONPATH", "")]),
           **({"SGLANG_USE_CPU_ENGINE": "1"} if device() == "cpu" else {})}
    asked = subprocess.run([*stage.CHILD, sys.executable, __file__, *map(str, directories)], capture_output=True, text=True, env=env)
    try:
        return json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return (asked.stderr.strip().splitlines() or ["no answer"])[-1][:200]


def look(directory):
    import torch
    from safetensors.torch import load_file
    from sglang.srt.models import llama_eagle3 as engine
    from sglang.srt.runtime_context import get_context, get_parallel
    from transformers import AutoConfig

    alone = SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
    if hasattr(engine, "get_pp_group"):  # 0.5.16
        engine.get_pp_group = lambda: alone
    one = {f"{name}_{what}": value for name in ("tp", "pp", "attn_tp", "attn_dp", "attn_cp") for what, value in (("rank", 0), ("size", 1))}
    config = AutoConfig.from_pretrained(directory)
    with get_context().override_server_args(), get_parallel().override(**one, pp_group=alone), torch.no_grad():
        draft, wrong = engine.LlamaForCausalLMEagle3(config).float(), []
        own = {name: p.fill_(float("nan")) for name, p in draft.named_parameters() if "embed_tokens" not in name}  # the target's
        empty = {name: p.numel() for name, p in own.items()}
        for name, value in sorted(load_file(directory / "model.safetensors").items()):
            if "embed_tokens" in name or name == "t2d":
                continue
            try:
                draft.load_weights([(name, value.float() if value.is_floating_point() else value)])
            except (RuntimeError, AssertionError, ValueError) as error:
                wrong.append(f"{name} {list(value.shape)} does not fit: {str(error).splitlines()[0] if str(error) else 'another shape'}")
                continue
            left = {n: int(p.isnan().sum()) for n, p in own.items()}
            if name != "d2t" and left == empty:
                wrong.append(f"{name} {list(value.shape)} would be dropped")
            empty = left
        for name, parameter in own.items():
            if parameter[:config.draft_vocab_size if name == "lm_head.weight" else None].isnan().any():  # it pads a vocabulary
                wrong.append(f"{name} {list(parameter.shape)} would stay unfilled")
        if draft.hot_token_id is None and config.draft_vocab_size != config.vocab_size:
            wrong.append("d2t is missing: the proposals would be taken for other tokens")
    return wrong


if __name__ == "__main__":
    print(json.dumps({directory: look(Path(directory)) for directory in sys.argv[1:]}))
