"""SpecForge 0.2.0 (SGLang's own trainer) on the rows and states of a run, for a comparison: features, training, export.

    python tests/benchmarks/peer.py --out DIR learning_rate=1e-3 ttt_length=3    # DIR has 02_prepare and 03_extract-bf16

Needs pip install --no-deps specforge==0.2.0 pyyaml accelerate.  Its features are made once, in DIR/peer-features.  What is not
named on the command line is its default: learning rate 1e-4, 7 proposals weighted 0.8^i, cosine, 1.5 % warm-up, clip 0.5, a
trained head with a random start.  Set here: 32 rows a step, as many tokens as 04's 8,192; attention by sdpa.
"""
import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
EPOCHS, ROWS, VOCAB = 4, 32, 32000
preparing = threading.Lock()  # of the features, by drafts that train side by side


def features(out, model):
    """DIR/peer-features: a file a training row, the target with the index that SpecForge asks for, the draft's configuration."""
    from datasets import load_from_disk
    from safetensors import safe_open

    folder = out / "peer-features"
    if (folder / "draft.json").exists():
        return folder
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    (folder / "target").mkdir(exist_ok=True)
    for path in model.iterdir():
        (folder / "target" / path.name).unlink(missing_ok=True)
        (folder / "target" / path.name).symlink_to(path.resolve())
    with safe_open(model / "model.safetensors", "pt") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    (folder / "target/model.safetensors.index.json").write_text(json.dumps(index))
    split = load_from_disk(out / "02_prepare/dataset").with_format(None)["split"][:]
    rows = [row for row, where in enumerate(split) if where == "train"]
    with ProcessPoolExecutor(min(8, os.cpu_count())) as pool:
        list(pool.map(convert, [out] * 64, [model] * 64, [rows[k::64] for k in range(64)]))
    target = json.loads((model / "config.json").read_text())
    kept = ("attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
            "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
    rope = target.get("rope_theta") or (target.get("rope_parameters") or target.get("rope_scaling"))["rope_theta"]
    (folder / "draft.json").write_text(json.dumps({**{k: target[k] for k in kept if k in target}, "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama", "num_hidden_layers": 1, "rope_theta": rope, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "pretraining_tp": 1, "use_cache": True, "draft_vocab_size": VOCAB}))
    return folder


def convert(out, model, rows):
    """SpecForge wants the last state after the final norm."""
    import torch
    from datasets import load_from_disk
    from safetensors import safe_open
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    with safe_open(model / "model.safetensors", "pt") as file:
        norm = file.get_tensor("model.norm.weight").float()
    eps, table = json.loads((model / "config.json").read_text())["rms_norm_eps"], load_from_disk(out / "02_prepare/dataset").with_format(None)
    for row in rows:
        found, states = table[row], load_file(out / f"03_extract-bf16/hs_{row}.safetensors")["hidden_states"]
        last = states[:, 3].float()
        torch.save({"input_ids": torch.tensor(found["input_ids"]), "loss_mask": torch.tensor(found["loss_mask"]).long(),
                    "hidden_state": (last * torch.rsqrt(last.square().mean(-1, keepdim=True) + eps) * norm).bfloat16()[None],
                    "aux_hidden_state": states[:, :3].reshape(1, len(states), -1).clone()}, out / f"peer-features/rows/data_{row:06d}.ckpt")


def train(out, name, model, recipe, timeout):
    """DIR/NAME/04_train/sglang: the exported draft.  Returns {"seconds", "directory"}."""
    import export

    with preparing:
        folder = features(out, model)
    home = out / name / "04_train"
    home.mkdir(parents=True, exist_ok=True)
    (home / "run.json").write_text(json.dumps({
        "model": {"target_model_path": str(folder / "target"), "draft_model_config": str(folder / "draft.json"), "torch_dtype": "bfloat16",
                  "embedding_key": "model.embed_tokens.weight", "lm_head_key": "model.embed_tokens.weight"},
        "data": {"hidden_states_path": str(folder / "rows"), "cache_dir": str(home / "cache")},
        "training": {"num_epochs": EPOCHS, "batch_size": ROWS, "attention_backend": "sdpa", "fsdp_sharding": "NO_SHARD", **recipe},
        "run_id": name, "output_dir": str(home / "run"),
        "deployment": {"mode": "local_colocated", "trainer": {"nnodes": 1, "nproc_per_node": 1}}}))
    began = time.monotonic()
    with open(out / f"{name}.log", "w") as log:
        for words in (["train", "-c", home / "run.json"],
                      ["export", "--to", "sglang", "--checkpoint", home / "run", "--draft-config", folder / "draft.json",
                       "--output-dir", home / "exported"]):
            subprocess.run([sys.executable, Path(__file__), "--specforge", *map(str, words)], check=True, stdout=log, stderr=log,
                           timeout=timeout, cwd=home)
    export.adopt(home / "exported", home / "sglang", model)
    done = {"trainer": "specforge 0.2.0", "epochs": EPOCHS, "rows_a_step": ROWS}
    (home / "done.json").write_text(json.dumps(done))
    return {"seconds": round(time.monotonic() - began, 1), "directory": home}


def specforge(words):
    """SpecForge's command line; on a CPU its loss, a Triton kernel, is the package's own reference."""
    import torch

    if not torch.cuda.is_available():
        import specforge.algorithms.eagle3.model as model
        import specforge.core.loss as loss

        model.LogSoftmaxLoss = type("Reference", (), {"apply": staticmethod(loss._compute_loss)})
    from specforge.cli import main
    raise SystemExit(main(words))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--specforge"]:
        specforge(sys.argv[2:])
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="directory of the run")
    p.add_argument("--name", default="peer", help="of the draft (default peer)")
    p.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    p.add_argument("recipe", nargs="*", help="name=value of SpecForge's training section")
    args = p.parse_args()
    print(train(args.out.resolve(), args.name, args.model.resolve(), {k: json.loads(v) for k, v in (w.split("=") for w in args.recipe)}, None))
