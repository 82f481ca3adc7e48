"""Train the draft model on the extracted states, and export it for SGLang.

Example
    python scripts/04_train.py --tokens runs/try/02_prepare --states runs/try/03_extract --model models/smollm2-135m \\
        --out runs/try/base/04_train --draft-vocab 8192 --epochs 5

Reads   --tokens    02_prepare: dataset, token_freq.pt
        --states    03_extract: hs_{row}.safetensors, contract.json
        --model     embedding, final norm and head of the target
Writes  metrics.jsonl      step, time, epoch, loss, acc (by position), lr, tokens_per_s     every 10 steps
        validation.jsonl   the same on the held-out rows                                   every epoch
        checkpoints/       step-N.pt, the newest two: float32 weights, optimizer, schedule
        draft/             the draft in speculators' format
        sglang/            the draft as SGLang loads it
        curves.png         loss and accuracy
        contract.json      completed by the draft's norms and vocabulary
        done.json

acc of position k: share of trained positions where the first k proposals are all right (within the draft vocabulary).
Runs on a CPU, on one GPU, and on NPROC ranks (environment, through torchrun).  SAVE_EVERY (seconds, default 1200)
between checkpoints, and one at each epoch's end; the same command resumes at the newest.
"""
from pathlib import Path

import contract
import progress
import stage
import states
import vocab


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--tokens", type=Path, required=True, help="02_prepare's directory")
    p.add_argument("--states", type=Path, required=True, help="03_extract's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--draft-vocab", type=int, default=32000, help="tokens the draft can propose (default 32000)")
    p.add_argument("--draft-coverage", type=float, default=0.0,
                   help="instead: as many tokens as cover this share of the trained ones, e.g. 0.995 (default 0: off)")
    p.add_argument("--epochs", type=int, default=5, help="passes over the training rows (default 5)")
    p.add_argument("--batch-tokens", type=int, default=8192, help="tokens of one step over all ranks (default 8192)")
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of AdamW (default 1e-3)")
    p.add_argument("--warmup-ratio", type=float, default=0.01, help="share of steps that warm up (default 0.01)")
    p.add_argument("--weight-decay", type=float, default=0.01, help="of AdamW (default 0.01)")
    p.add_argument("--ttt-steps", type=int, default=3, help="proposals the draft is unrolled for; a server asks for 3 (default 3)")
    p.add_argument("--seed", type=int, default=0, help="of initial weights and row order (default 0)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    stage.torchrun()
    progress.plan("loading libraries", "loading the target's", "planning", "checking", "training", "exporting", "comparing", "drawing")
    progress.phase("loading libraries")
    import trainer
    from export import export

    made = contract.check(args.states, target=stage.model_identity(args.model), layer_meaning=contract.STATE,
                          last_state=contract.LAST, tokenizer=contract.read(args.tokens)["tokenizer"])
    progress.phase("loading the target's embedding and head")
    counts = vocab.load_counts(args.tokens / "token_freq.pt")
    config = contract.text_config(args.model)
    target_vocab = config.vocab_size
    size = vocab.size_for(counts, args.draft_coverage, made["special_ids"]) if args.draft_coverage else args.draft_vocab
    d2t, t2d = vocab.mapping(counts, min(size, target_vocab), target_vocab, always=made["special_ids"])
    ranks = trainer.Ranks()
    draft = trainer.build_draft(args.model, made["layer_ids"], d2t, t2d, args.ttt_steps, args.seed,
                                attention="simple_flex_attention" if ranks.device.type == "cuda" else "sdpa")
    progress.phase("planning the epochs")
    data = trainer.Data(args.tokens, args.states, config.hidden_size, args.batch_tokens, args.epochs, args.seed, ranks)
    progress.plan(("checking", len(data.lengths)), ("training", len(data.steps)), "exporting", "comparing", "drawing",
                  rows=len(data.lengths))
    progress.phase("checking the states", len(data.lengths), "row")
    for row, ids in enumerate(data.ids()):
        if not states.intact(states.file_of(args.states, row), ids, config.hidden_size):
            raise stage.Refused(f"{states.file_of(args.states, row)} is missing, broken or holds states of other token ids: "
                                "run 03 again with REDO=1")
        progress.advance()
    run = trainer.Trainer(draft, data, args, out, ranks)
    trained, frozen = (sum(p.numel() for p in draft.parameters() if p.requires_grad is wanted) for wanted in (True, False))
    progress.log(f"{run.total} steps, {run.warmup} of them warm-up, {args.epochs} epochs, {ranks.size} rank(s) on {ranks.device.type}")
    progress.log(f"{trained / 1e6:.1f}M parameters trainable, {frozen / 1e6:.1f}M frozen")
    progress.log(f"{len(data.rows['train'])} rows, {sum(data.lengths[i] for i in data.rows['train'])} tokens to train on; "
                 f"{len(data.rows['val'])} rows held out")
    progress.log(vocab.ceiling(counts, vocab.load_counts(args.tokens / "token_freq_held_out.pt"), t2d, args.ttt_steps))
    run.run()
    if ranks.rank:
        return
    export(draft, data, args.model, out)
    progress.phase("drawing curves.png")
    draw(out)
    contract.write(out, args.states, fc_norm=True, norm_output=True, norm_before_residual=False, draft_vocab=vocab.identity(d2t),
                   most_frequent_token=max(counts, key=counts.get))
    stage.finish(out, len(data.lengths), len(data.lengths), {}, steps=run.total, ranks=ranks.size,
                 last=trainer.last_row(out / "metrics.jsonl"), held_out=trainer.last_row(out / "validation.jsonl"))


def draw(out):
    """curves.png: loss and accuracy by step, training and held out."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from jsonl import read

    figure, (losses, accuracies) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, style in (("metrics", "-"), ("validation", "o--")):
        rows = [row for _, row in read(out / f"{name}.jsonl")] if (out / f"{name}.jsonl").exists() else []
        label = "training" if name == "metrics" else "held out"
        steps = [row["step"] for row in rows]
        losses.plot(steps, [row["loss"] for row in rows], style, label=label)
        for k in range(len(rows[0]["acc"]) if rows else 0):
            accuracies.plot(steps, [row["acc"][k] for row in rows], style, color=f"C{k}", label=f"{label}, position {k + 1}")
    losses.set(xlabel="step", ylabel="loss")
    accuracies.set(xlabel="step", ylabel="proposals right up to the position")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(out / "curves.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    stage.run(main)
