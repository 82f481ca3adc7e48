"""Turn answered conversations into token ids and a loss mask, and count the tokens that will be trained.

Example
    python scripts/02_prepare.py --answers runs/try/01_generate --model models/smollm2-135m --out runs/try/02_prepare

Reads   --answers    01_generate/rows.jsonl
        --model      tokenizer and chat template of the target
Writes  dataset/        arrow, one row a sample, in the order of rows.jsonl (speculators' layout)
                        input_ids int64 [T], loss_mask int64 [T] (1: the answer and its end of turn), seq_len, id, split
        token_freq.pt   {token id: how often it is trained}, training split only
        coverage.png    share of trained tokens that a draft vocabulary of K tokens covers;  coverage.json: the points
        heldout.jsonl   id, messages: the prompts of the validation split, to evaluate with
        contract.json   target, tokenizer, template: what every later stage checks
        done.json

A row that can't be trained is dropped for a named reason and counted.  The split follows from the id alone, so it does
not move when the data grow.
"""
import hashlib
import json
from collections import Counter
from pathlib import Path

import chat
import contract
import progress
import stage
import vocab
from jsonl import read
from stage import Refused


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--answers", type=Path, required=True, help="01_generate's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--max-seq-len", type=int, default=4096, help="longer rows are dropped (default 4096)")
    p.add_argument("--val-share", type=float, default=0.1, help="share of rows held out from training (default 0.1)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", "tokenizing", "writing", "counting")
    progress.phase("loading libraries")
    from datasets import Dataset, Features, Sequence, Value

    tokenizer = chat.load_tokenizer(args.model)
    end_ids = chat.end_of_turn_ids(tokenizer, args.model)
    room = contract.text_config(args.model).max_position_embeddings - 1  # 03 asks for one token more
    rows_in = sum(1 for _ in read(args.answers / "rows.jsonl"))
    dropped, counts, held = Counter(), Counter(), []

    progress.plan(("tokenizing", rows_in), "writing", "counting", rows=rows_in)
    progress.phase("tokenizing", rows_in, "row")

    def samples():
        for number, row in read(args.answers / "rows.jsonl"):
            stage.check_stop()
            if not isinstance(row.get("id"), str):
                raise Refused(f"{args.answers}/rows.jsonl line {number}: id is {row.get('id')!r}, wanted a text")
            try:
                ids, mask = chat.sample(tokenizer, row, end_ids)
                if len(ids) > min(args.max_seq_len, room):
                    raise chat.Dropped("too long")
            except chat.Dropped as reason:
                dropped[str(reason)] += 1
                progress.advance(dropped=sum(dropped.values()))
                continue
            split = "val" if held_out(row["id"], args.val_share) else "train"
            if split == "train":
                counts.update(t for t, m in zip(ids, mask) if m)
            else:
                held.append({"id": row["id"], "messages": row["messages"][:-1]})
            progress.advance()
            yield {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids), "id": row["id"], "split": split}

    features = Features({"input_ids": Sequence(Value("int64")), "loss_mask": Sequence(Value("int64")),
                         "seq_len": Value("int64"), "id": Value("string"), "split": Value("string")})
    rows = list(samples())
    if not counts:
        raise Refused(f"no row of {args.answers}/rows.jsonl can be trained; dropped: {dict(dropped)}")
    progress.phase("writing the dataset")
    data = Dataset.from_list(rows, features=features)
    splits, tokens = Counter(data["split"]), sum(data["seq_len"])
    data.set_format("torch")  # speculators compares rows with torch.equal; the format is stored with the dataset
    with stage.directory(out / "dataset") as temporary:
        data.save_to_disk(temporary)

    progress.phase("counting tokens")
    vocab.save_counts(counts, out / "token_freq.pt")
    stage.write(out / "coverage.json", json.dumps(vocab.coverage(counts), indent=1) + "\n")
    vocab.draw_coverage(counts, out / "coverage.png")
    stage.write(out / "heldout.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in held))
    contract.write(out, target=stage.model_identity(args.model), tokenizer=contract.tokenizer_hash(args.model),
                   chat_template=chat.template_hash(tokenizer), end_of_turn_ids=sorted(end_ids))
    trained = sum(counts.values())
    progress.log(f"{len(data)} rows, {tokens} tokens, {trained} of them trained, {len(counts)} distinct; "
                 f"held out {splits['val']} rows")
    stage.finish(out, rows_in, len(data), dropped, train_rows=splits["train"], val_rows=splits["val"],
                 tokens=tokens, trained_tokens=trained, distinct_tokens=len(counts))


def held_out(name, share):
    """Whether a row belongs to the validation split: a share of all possible ids, drawn by hash."""
    return int(hashlib.sha256(f"split:{name}".encode()).hexdigest()[:8], 16) < share * 2 ** 32


if __name__ == "__main__":
    stage.run(main)
