"""Tokens per second of 04_train against speculators' own command line: equal rows, packs, recipe and precision.

    python tests/benchmarks/train.py --rows 120 --hidden 256 --vocab 8000 --repeat 2
    NPROC=2 python tests/benchmarks/train.py --rows 4000 --length 1000 --pack 8192 --hidden 4096 --vocab 128000 --draft-vocab 32000

The states are random numbers of the right shape, rows of equal length, so that both fill their packs alike.  Both run in turn,
`--repeat` times; a speed is that between the first report after 10 steps and the last of the epoch, so start, compilation,
validation and checkpoints are left out.  Prints each pass, the shares of time of 04's last reports, and at the end one JSON line:
both medians, and the ratio that counts.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]
LAYERS = [2, 4, 5]


def build(root, args):
    """A target of random weights, and 02's and 03's directories, as both trainers read them."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    import contract
    import stage
    import tiny

    tiny.make(root / "target")
    LlamaForCausalLM(LlamaConfig(vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=8,
                                 num_attention_heads=args.hidden // 64, head_dim=64, tie_word_embeddings=False)
                     ).to(torch.bfloat16).save_pretrained(root / "target")
    ids = torch.randint(0, args.vocab, (args.rows, args.length), generator=torch.Generator().manual_seed(0))
    half = args.length // 2
    data = Dataset.from_list([{"input_ids": row, "loss_mask": [0] * half + [1] * (args.length - half), "seq_len": args.length, "id": str(i),
                               "split": "train" if i < int(args.rows * 0.9) else "val"} for i, row in enumerate(ids.tolist())])
    data.set_format("torch")
    data.save_to_disk(root / "02/dataset")
    (root / "03").mkdir()
    for i, row in enumerate(ids):
        save_file({"hidden_states": torch.randn(args.length, 4, args.hidden).to(torch.bfloat16), "token_ids": row},
                  root / f"03/hs_{i}.safetensors")
    counts = dict(zip(*(t.tolist() for t in ids.unique(return_counts=True))))
    for folder in ("02", "02/dataset"):
        torch.save(counts, root / folder / "token_freq.pt")
    torch.save(counts, root / "02" / "token_freq_held_out.pt")
    (root / "02/dataset/hidden_states").symlink_to(root / "03")
    contract.write(root / "02", target=stage.model_identity(root / "target"), tokenizer=contract.tokenizer_hash(root / "target"),
                   end_of_turn_ids=[2], special_ids=[2])
    contract.write(root / "03", root / "02", layer_ids=LAYERS, layer_meaning=contract.STATE, last_state=contract.LAST)
    for folder in ("02", "03"):
        (root / folder / "done.json").write_text("{}")


def ours(root, out, args):
    subprocess.run([sys.executable, "scripts/04_train.py", "--tokens", root / "02", "--states", root / "03", "--model", root / "target",
                    "--out", out, "--draft-vocab", str(args.draft_vocab), "--epochs", "1", "--pack-tokens", str(args.pack),
                    "--batch-tokens", str(args.pack * int(os.environ.get("NPROC", 1)))], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps({"time_in": rows[-1]["time_in"]}), flush=True)
    return [(row["step"], row["time"]) for row in rows]


def theirs(root, out, args):
    import torch
    ranks, cuda = os.environ.get("NPROC", "1"), torch.cuda.is_available()
    start = [sys.executable] if ranks == "1" else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*start, __file__, "--speculators", str(out), "--verifier-name-or-path", root / "target", "--data-path", root / "02/dataset",
                    "--save-path", out / "checkpoints", "--log-dir", out, "--speculator-type", "eagle3", "--num-layers", "1",
                    "--target-layer-ids", *map(str, LAYERS), "--draft-vocab-size", str(args.draft_vocab), "--on-missing", "raise",
                    "--total-seq-len", str(args.pack), "--num-workers", os.environ.get("WORKERS", "4" if cuda else "0"), "--epochs", "1",
                    "--no-norm-before-residual", "--full-attention-indices", "0", "--no-norm-before-fc", "--fc-norm", "--norm-output",
                    "--optimizer", "adamw", "--lr", "1e-3", "--log-freq", "10", "--loss-implementation", "eager",
                    *([] if cuda else ["--draft-attn-impl", "sdpa", "--hidden-states-dtype", "float32"])],
                   check=True, stdout=sys.stderr)
    return [tuple(json.loads(line)) for line in (out / "steps.jsonl").read_text().splitlines()]


def speculators(out, flags):
    """speculators' command line in this process, noting when it reports a step; on a CPU, what it lacks there."""
    import logging

    import torch

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import speculators.train.checkpointer as checkpointer
    import speculators.train.cli as cli
    import speculators.train.distributed as distributed
    import speculators.train.trainer as trainer
    from speculators.train.config import TrainConfig

    class Note(logging.Handler):
        def emit(self, record):
            if isinstance(record.msg, dict) and "global_step" in record.msg and int(os.environ.get("RANK", 0)) == 0:
                with open(Path(out) / "steps.jsonl", "a") as file:
                    file.write(json.dumps([record.msg["global_step"], time.time()]) + "\n")

    loggers = cli.setup_metric_logger

    def noted(*args, **more):
        loggers(*args, **more)
        logging.getLogger("speculators.metrics").addHandler(Note())

    cli.setup_metric_logger = noted
    if not torch.cuda.is_available():
        checkpointer.get_current_device = lambda: "cpu"
        torch.accelerator.synchronize = lambda *a, **k: None
        trainer.get_local_rank = lambda: torch.device("cpu")
        prepare = trainer.Trainer.setup_trainer
        trainer.Trainer.setup_trainer = lambda self: (setattr(self, "device_type", "cpu"), prepare(self))

        def meet(sp_size=1):
            if "LOCAL_RANK" in os.environ:
                torch.distributed.init_process_group("gloo")
                distributed._local_rank, distributed._is_distributed = int(os.environ["LOCAL_RANK"]), True
                distributed._rank, distributed._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
                distributed._init_sp_process_groups(distributed._rank, distributed._world_size, sp_size)
        distributed.maybe_setup_distributed = cli.maybe_setup_distributed = meet
    cli.main(TrainConfig.resolve(flags))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(rows=120, length=250, pack=1024, hidden=256, vocab=8000, draft_vocab=4000, repeat=2).items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = p.parse_args()
    speeds = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build(root, args)
        for k in range(args.repeat):
            for name, run in (("ours", ours), ("theirs", theirs)) if k % 2 == 0 else (("theirs", theirs), ("ours", ours)):
                out = root / f"{name}-{k}"
                if name == "theirs":
                    out.mkdir()
                seen = [(step, at) for step, at in run(root, out, args) if step >= 10]
                (first, began), (last, ended) = seen[0], seen[-1]
                per_step = args.pack // args.length * (args.length - 1) * int(os.environ.get("NPROC", 1))
                speeds[name].append((last - first) * per_step / (ended - began))
                print(f"pass {k} {name:>6}: {speeds[name][-1]:.0f} tokens/s", flush=True)
    found = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    print(json.dumps({"tokens_per_s": found, "ratio": round(found["ours"] / found["theirs"], 3), "all": speeds, **vars(args),
                      "nproc": os.environ.get("NPROC", "1")}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--speculators"]:
        speculators(sys.argv[2], sys.argv[3:])
    else:
        main()
