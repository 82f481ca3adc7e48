"""Turn answered conversations into token ids and a loss mask, and count the tokens that will be trained.

Example
    python scripts/02_prepare.py --answers runs/try/01_generate --model models/smollm2-135m --out runs/try/02_prepare

Reads   --answers    01_generate/rows.jsonl
        --model      tokenizer and chat template of the target
Writes  dataset/        arrow, one row a sample, in the order of rows.jsonl (speculators' layout)
                        input_ids int64 [T], loss_mask int64 [T] (1: an answer and its end of turn), seq_len, id, split
        token_freq.pt   {token id: how often it is trained}, training split; token_freq_held_out.pt: validation split
        coverage.png    share of trained tokens that a draft vocabulary of K tokens covers, in all, by the rows' `source`,
                        and of the validation split;  coverage.json: the points
        heldout.jsonl   id, messages: the prompts of the validation split, to evaluate with
        contract.json   target, tokenizer, template: what every later stage checks
        done.json

A row is a conversation; it gives several samples where the template rewrites history.  One that can't be trained is
dropped for a named reason and counted.  The split follows from how a conversation opens, so it does not move when the
data grow, and doubles stay together.  WORKERS processes (environment; default: one a core) finish shards of 1,000 lines
each; resuming goes on with the next shard.
"""
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import charts
import chat
import contract
import progress
import shards
import show
import stage
import vocab
from stage import Refused

USUAL = (0.03, 0.97)  # share of tokens that are trained; outside it a mask is more often wrong than right


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--answers", type=Path, required=True, help="01_generate's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--max-seq-len", type=stage.count, default=4096, help="most tokens of a sample (default 4096)")
    p.add_argument("--long-rows", choices=["drop", "cut", "split"], default="drop",
                   help="longer ones: drop them, cut them, or split them at turns (default drop)")
    p.add_argument("--trained-turns", choices=["all", "last"], default="all",
                   help="every answer of a conversation that the target gave, or the last one only (default all)")
    p.add_argument("--train-reasoning", choices=["yes", "no"], default="yes", help="no: it is read only (default yes)")
    p.add_argument("--max-dropped", type=float, default=0.2, help="fail if a larger share of rows is dropped (default 0.2)")
    p.add_argument("--val-share", type=float, default=0.1, help="share of conversations held out from training (default 0.1)")
    p.add_argument("--split-seed", type=int, default=0, help="another one holds out others (default 0)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", "tokenizing", "joining", "counting")
    progress.phase("loading libraries")
    from datasets import concatenate_datasets, load_from_disk

    tokenizer = chat.load_tokenizer(args.model)
    end_ids = chat.end_of_turn_ids(tokenizer, args.model)
    config = contract.text_config(args.model)
    masker = chat.Masker(tokenizer, end_ids, min(args.max_seq_len, config.max_position_embeddings - 1),  # 03 asks for one more
                         config.vocab_size, args.long_rows, args.trained_turns, args.train_reasoning == "yes")
    folders = shards.make(args, masker)

    progress.phase("joining the shards")
    tally = defaultdict(Counter)
    for folder in folders:
        for name, counts in json.loads((folder / "tally.json").read_text()).items():
            tally[name].update(counts)
    rows, dropped = tally["rows"], tally["dropped"]
    if not rows["train"]:
        raise Refused(f"no row of {args.answers}/rows.jsonl can be trained; dropped: {dict(dropped)}, held out: {rows['val']}")
    if dropped.total() > args.max_dropped * rows["in"]:
        raise Refused(f"{dropped.total()} of {rows['in']} rows of {args.answers}/rows.jsonl are dropped, more than --max-dropped "
                      f"{args.max_dropped:g} allows: {dict(dropped.most_common())}")
    data = concatenate_datasets([load_from_disk(folder / "samples") for folder in folders])
    data.set_format("torch")  # speculators compares rows with torch.equal; the format is stored with the dataset
    with stage.directory(out / "dataset") as temporary:
        data.save_to_disk(temporary)
    with open(out / "heldout.jsonl", "wb") as file:
        for folder in folders:
            file.write((folder / "heldout.jsonl").read_bytes())

    progress.phase("counting tokens")
    by_source = {name[6:]: {int(t): n for t, n in c.items()} for name, c in sorted(tally.items()) if name.startswith("train ")}
    counts, held = sum(map(Counter, by_source.values()), Counter()), {int(t): n for t, n in tally["val"].items()}
    vocab.save_counts(counts, out / "token_freq.pt")
    vocab.save_counts(held, out / "token_freq_held_out.pt")
    curves = {"all": counts, **(by_source if len(by_source) > 1 else {}), **({"held out": held} if held else {})}
    curves = {name: vocab.coverage(c, vocab.ranked(counts)) for name, c in curves.items()}
    stage.write(out / "coverage.json", json.dumps(curves, indent=1) + "\n")
    charts.draw(out / "coverage.png", ("share of trained tokens covered by the most frequent", {n: dict(c) for n, c in curves.items()}, "log"))
    special = {t for t, token in tokenizer.added_tokens_decoder.items() if token.special and (t in counts or t in held)}
    contract.write(out, target=stage.model_identity(args.model), tokenizer=contract.tokenizer_hash(args.model),
                   chat_template=chat.template_hash(tokenizer), chat_template_kwargs=json.loads(tally["modes"].most_common(1)[0][0]),
                   end_of_turn_ids=sorted(end_ids), special_ids=sorted(special | end_ids))
    report(args, tally, tokenizer, data)
    stage.finish(out, rows["in"], rows["out"], dropped, samples=len(data), train_samples=rows["train"], val_samples=rows["val"],
                 tokens=rows["tokens"], trained_tokens=rows["trained"], distinct_tokens=len(counts),
                 turns=dict(+tally["turns"]), retokenised=dict(tally["retokenised"]))
    shutil.rmtree(out / "shards")


def report(args, tally, tokenizer, data):
    """Say what was made, one sample as it is trained, and what looks wrong."""
    rows, again = tally["rows"], Counter(tally["retokenised"])
    again.pop("no text", 0)  # rows of ids alone
    trained, held = rows["trained"] / rows["tokens"], rows["val"] / len(data)
    progress.log(f"{len(data)} samples of {rows['out']} rows, {rows['tokens']} tokens, {trained:.0%} of them trained; held out {rows['val']} samples")
    first = data.with_format(None)[0]
    progress.log(f"the first one, trained text in brackets: {show.marked(tokenizer, first['input_ids'], first['loss_mask'])[-300:]}")
    if again:
        progress.log(f"the text of {again.total()} answers with the server's ids, rendered and tokenized again: {dict(again)}")
        for example in [text for text in tally["example"] if text][:1]:
            progress.log(f"for example, the {example}")
    if not USUAL[0] <= trained <= USUAL[1]:
        progress.log(f"warning: {trained:.1%} of the tokens are trained, which is unusual: look at some samples with make show ROW=n")
    if again["prompt differs"] > 0.1 * again.total():
        progress.log("warning: the server's prompts are not what this template makes of the messages: was another template or "
                     "thinking mode served?  The server's ids are trained")
    if rows["out"] >= 20 and not args.val_share / 2 <= held <= args.val_share * 2:
        progress.log(f"warning: {held:.0%} of the samples are held out, not {args.val_share:.0%}: many conversations open alike")


if __name__ == "__main__":
    stage.run(main)
