"""Show a sample of 02_prepare decoded, with the tokens that are trained marked: people look rather than read.

Example
    python scripts/show.py --tokens runs/try/02_prepare --model models/smollm2-135m --row 5

Reads   --tokens    02_prepare: dataset
        --model     tokenizer of the target
Writes  TOKENS/row-5.html, and on a terminal the text itself: trained tokens in colour, elsewhere in \u27e6 \u27e7
"""
import html
import sys
from itertools import groupby
from pathlib import Path

import stage
from stage import Refused

PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.7 monospace; white-space: pre-wrap; max-width: 110ch; margin: 2em auto; color: #777 }}
b {{ font-weight: normal; color: #000; background: #bfe8bf; border-right: 1px solid #7fbf7f }}</style>
<p>{title}: what is trained is green; hover for a token's place and id</p>
{body}
"""


def marked(tokenizer, ids, mask, opens="\u27e6", closes="\u27e7"):
    """The text of a sample, each stretch that is trained between `opens` and `closes`; control characters replaced."""
    text = ""
    for trained, run in groupby(zip(ids, mask), lambda pair: pair[1]):
        printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in tokenizer.decode([t for t, _ in run]))
        text += opens + printable + closes if trained else printable
    return text


def page(tokenizer, ids, mask, title):
    """The same as HTML, token by token; tokens that are text only together stand together."""
    body, begin = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end])
        if text.endswith("\ufffd") and end < min(len(ids), begin + 8) and mask[end] == mask[begin]:
            continue
        tag = "b" if mask[begin] else "span"
        body.append(f'<{tag} title="{begin}: {" ".join(map(str, ids[begin:end]))}">{html.escape(text)}</{tag}>')
        begin = end
    return PAGE.format(title=html.escape(title), body="".join(body))


def main():
    p = stage.arguments(__doc__)
    p.add_argument("--tokens", type=Path, required=True, help="02_prepare's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--row", type=int, required=True, help="number of a sample, as in hs_{row}.safetensors")
    args = p.parse_args()
    from datasets import load_from_disk

    import chat

    stage.identity(args.tokens)  # refuses what is no finished stage
    data, tokenizer = load_from_disk(args.tokens / "dataset").with_format(None), chat.load_tokenizer(args.model)
    if not 0 <= args.row < len(data):
        raise Refused(f"{args.tokens} holds samples 0 to {len(data) - 1}, not {args.row}")
    row = data[args.row]
    title = f"sample {args.row}, {row['id']}, {row['split']}: {sum(row['loss_mask'])} of {row['seq_len']} tokens trained"
    stage.write(args.tokens / f"row-{args.row}.html", page(tokenizer, row["input_ids"], row["loss_mask"], title))
    colours = ("\x1b[30;42m", "\x1b[0m") if sys.stdout.isatty() else ("\u27e6", "\u27e7")
    print(marked(tokenizer, row["input_ids"], row["loss_mask"], *colours))
    print(f"{title}; {args.tokens}/row-{args.row}.html")


if __name__ == "__main__":
    stage.run(main)
