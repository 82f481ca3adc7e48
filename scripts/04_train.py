"""Train the draft model on the extracted states, and export it for SGLang.

Example
    python scripts/04_train.py --tokens runs/try/02_prepare --states runs/try/03_extract --model models/smollm2-135m \\
        --out runs/try/base/04_train --draft-vocab 8192 --epochs 5

Reads   --tokens    02_prepare: dataset, token_freq.pt
        --states    03_extract: hs_{row}.safetensors, contract.json
        --model     embedding, final norm and head of the target
Writes  metrics.jsonl      step, time, epoch, loss, acc (by position), lr, skipped, tokens_per_s, time_in       every 10 steps
        validation.jsonl   loss, acc, acceptance, ceiling on the held-out rows                          every epoch
        quarantine.jsonl   row, id, reason: states that can't be used; the row is left out
        checkpoints/       step-N/, the newest two and the best: float32 weights, moments, schedule, random states
        draft/             the best draft in speculators' format
        sglang/            the same as SGLang loads it
        curves.png         loss and accuracy
        contract.json      completed by the draft's norms and vocabulary
        done.json

acc of position k: share of trained positions where the first k proposals are all right (within the draft vocabulary).
acceptance: acceptance length, walked over the held-out answers as a server does, misses of the vocabulary included; the
checkpoint with the highest is exported.  ceiling: of a draft that is right wherever its vocabulary lets it.

Where it runs changes no number and is environment: NPROC ranks (torchrun), of NNODES machines that share the disk
(NODE_RANK 0 .., RDZV=host:port of the first), SHARD=1 (FSDP2), WORKERS, LOGGER=tensorboard|wandb|trackio|mlflow, and
MICRO_TOKENS: what a rank runs at a time at most (16384 with a GPU, less where its memory says so; a pack on a CPU).
SAVE_EVERY (20m) between checkpoints, and one at each epoch's end; the same command resumes at the newest, with as many
ranks as there are then.
"""
from pathlib import Path

import charts
import contract
import progress
import stage
import states
import vocab
from jsonl import read


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--tokens", type=Path, required=True, help="02_prepare's directory")
    p.add_argument("--states", type=Path, required=True, help="03_extract's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--init", type=Path, help="start from this draft's weights (draft/ or sglang/ of a run, or a published one; "
                   "safetensors only): the cheapest route to a draft for a sibling of its target (default: from scratch)")
    p.add_argument("--draft-vocab", type=stage.count, default=32000, help="tokens the draft can propose (default 32000)")
    p.add_argument("--draft-coverage", type=float, default=0.0,
                   help="instead: as many tokens as cover this share of the trained ones, e.g. 0.995 (default 0: off)")
    p.add_argument("--train-rows", type=stage.count, help="train on so many rows only, drawn by --seed: what would more data give? (default all)")
    p.add_argument("--epochs", type=stage.count, default=5, help="passes over the training rows; one to three suffice from 200,000 rows on (default 5)")
    p.add_argument("--batch-tokens", type=stage.count, default=8192, help="tokens of one step over all ranks (default 8192)")
    p.add_argument("--pack-tokens", type=stage.count, help="tokens of a pack: a step is --batch-tokens / --pack-tokens packs, dealt to the ranks "
                   "(default: --batch-tokens, its half, quarter .., the smallest that holds every row and stays at most 5 %% empty)")
    p.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: speculators' default, Muon for the matrices; "
                   "no public comparison (default adamw, as everyone's published drafts)")
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate; on 391 rows 1e-3 gave 1.68 and 1e-4 1.33, with 500,000 rows "
                   "3e-4 to 5e-5 are in use (default 1e-3)")
    p.add_argument("--schedule", choices=("linear", "cosine", "constant"), default="linear", help="of the learning rate after warm-up; "
                   "all three are in use, none was compared (default linear, as speculators)")
    p.add_argument("--warmup-ratio", type=float, default=0.01, help="share of steps that warm up (default 0.01, as speculators)")
    p.add_argument("--weight-decay", type=float, default=0.01, help="of both optimizers (default 0.01, as speculators)")
    p.add_argument("--clip-norm", type=float, default=1.0, help="largest norm of a gradient; EAGLE takes 0.5 (default 1.0, as speculators)")
    p.add_argument("--ttt-steps", type=stage.count, default=3, help="proposals the draft is unrolled for; at least what a server asks for, and it "
                   "asks for 3; 7 cost twice the time (default 3: 5 gained nothing, also with 5 asked for; README)")
    p.add_argument("--ttt-decay", type=float, default=1.0, help="weight of a proposal's loss against the one before; EAGLE 0.8 "
                   "(default 1.0: speculators' best published drafts have equal weights)")
    p.add_argument("--loss", choices=("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"), default="kl_div",
                   help="speculators' losses between draft and target; tv and nla bound acceptance itself (default kl_div, as its best drafts)")
    p.add_argument("--lm-head", choices=("frozen", "trained"), default="frozen", help="the draft's head, the target's rows at first; "
                   "trained gave 2.61 for 2.57 with twice the parameters, where seeds differ by 0.02 (default frozen)")
    p.add_argument("--out-of-vocab", choices=("train", "mask"), default="train", help="mask: no loss where the next token is outside the "
                   "draft vocabulary, as EAGLE; not compared in public (default train, as speculators)")
    p.add_argument("--norms", choices=("3.1", "3"), default="3.1", help="3.1: EAGLE-3.1's norms of the target's states and of the draft's "
                   "own; 3: neither, as EAGLE-3 and SpecForge (default 3.1: 2.57 for 2.07 on SmolLM2-135M, README; in public +7.2%% "
                   "acceptance length on Qwen3-8B, +1.1%% on Qwen3-30B-A3B)")
    p.add_argument("--draft-layers", type=stage.count, default=1, help="decoder layers (default 1: each proposal costs one more pass through them)")
    p.add_argument("--max-broken", type=float, default=0.01, help="share of rows with broken states to go on without (default 0.01)")
    p.add_argument("--seed", type=int, default=0, help="of initial weights and row order (default 0)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args, several_nodes=True)
    if not 0 <= args.warmup_ratio < 1:
        raise stage.Refused(f"--warmup-ratio {args.warmup_ratio}: a share of the steps, less than 1")
    stage.torchrun(out)
    progress.plan("loading libraries", "loading the target's", "planning", "checking", "fitting", "training", "exporting", "comparing", "drawing")
    progress.phase("loading libraries")
    import packing
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

    def fresh():
        return trainer.build_draft(args.model, made["layer_ids"], d2t, t2d, args.ttt_steps, args.seed, norms=args.norms,
                                   layers=args.draft_layers, lm_head=args.lm_head,
                                   attention="simple_flex_attention" if ranks.device.type == "cuda" else "sdpa")

    draft = fresh()
    if args.init:
        trainer.start_from(draft, args.init, d2t)
        progress.log(f"starting from the weights of {args.init}")
    progress.phase("planning the epochs")
    data = packing.Data(args.tokens, args.states, config.hidden_size, args.batch_tokens, args.epochs, args.seed, ranks,
                        args.pack_tokens, args.train_rows, t2d if args.out_of_vocab == "mask" else None)
    rows = data.rows["train"] + data.rows["val"]
    mine = rows[ranks.rank::ranks.size]
    progress.plan(("checking", len(mine)), "fitting", ("training", len(data.steps)), "exporting", "comparing", "drawing", rows=len(data.lengths))
    progress.phase("checking the states", len(mine), "row")
    for row in mine:
        stage.check_stop()
        if not states.intact(states.file_of(args.states, row), data.table[row]["input_ids"], config.hidden_size):
            data.exclude({row: "is missing, cut off or holds states of other token ids"})
        progress.advance()
    data.quarantine(out, args.max_broken)
    run = trainer.Trainer(draft, data, args, out, ranks)
    trained, frozen = (sum(p.numel() for p in draft.parameters() if p.requires_grad is wanted) for wanted in (True, False))
    progress.log(f"{run.total} steps, {run.warmup} of them warm-up, {args.epochs} epochs, {ranks.size} rank(s) on {ranks.device.type}"
                 + ", sharded" * ranks.sharded)
    progress.log(f"{trained / 1e6:.1f}M parameters trainable, {frozen / 1e6:.1f}M frozen")
    progress.log(f"{len(data.rows['train'])} rows, {data.count([data.rows['train']])} tokens to train on; "
                 f"{len(data.rows['val'])} rows held out")
    progress.log(vocab.ceiling(counts, vocab.load_counts(args.tokens / "token_freq_held_out.pt"), t2d, args.ttt_steps))
    progress.phase("fitting the batches to the memory")
    run.run()
    if ranks.rank:
        return
    if data.validation:
        progress.log(f"exporting the draft of step {run.best['step']}, acceptance length {run.best['acceptance']:.3f}: the best")
    export(run.load_best(fresh()), data, args.model, out, [
        ("trained on", f"{len(data.rows['train'])} rows, {data.count([data.rows['train']])} tokens, {args.epochs} epochs, {args.loss}"),
        ("acceptance length, held out, walked", f"{run.best['acceptance']:.3f}, {args.ttt_steps} proposals" if data.validation else "nothing held out")])
    progress.phase("drawing curves.png")
    draw(out)
    contract.write(out, args.states, fc_norm=args.norms == "3.1", norm_output=args.norms == "3.1", norm_before_residual=False,
                   draft_vocab=vocab.identity(d2t), most_frequent_token=max(counts, key=counts.get))
    stage.finish(out, len(data.lengths), len(rows) - len(data.broken),
                 {"broken states": len(data.broken), "beyond --train-rows": len(data.lengths) - len(rows)}, steps=run.total,
                 tokens=sum(data.table["seq_len"]), ranks=ranks.size, skipped_steps=run.skipped, best=run.best,
                 last=trainer.last_row(out / "metrics.jsonl"), held_out=trainer.last_row(out / "validation.jsonl"))


def draw(out):
    """curves.png: loss and accuracy by step, training and held out."""
    rows = {label: [row for _, row in read(path)] for label, path in (("training", out / "metrics.jsonl"), ("held out", out / "validation.jsonl"))
            if path.exists()}
    charts.draw(out / "curves.png", ("loss by step", {label: {r["step"]: r["loss"] for r in found} for label, found in rows.items()}, "line"),
                ("proposals right up to the position, by step", {f"{label}, position {k + 1}": {r["step"]: r["acc"][k] for r in found}
                 for label, found in rows.items() for k in range(len(found[0]["acc"]))}, "line"))


if __name__ == "__main__":
    stage.run(main)
