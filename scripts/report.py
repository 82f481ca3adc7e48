"""What a draft is worth, from results.json alone: report.md, and report.html with its pictures inside.  Of several: one table.

Example
    python scripts/report.py runs/try/base/05_eval
    python scripts/report.py runs/try/base/05_eval runs/try/hot/05_eval      compared, where they can be

Reads   results.json and pictures of 05's directories
Writes  report.md, report.html, report.png, card.md beside them; the table of several to stdout
"""
import base64
import html
import json
import shutil
from pathlib import Path

import charts
import stage
from jsonl import read
from sglang_server import draft_flags

NAMES = {"trained": "the trainer's model", "untrained": "an untrained draft", "most_frequent_token": "the most frequent token, always"}
DRAFT = ("draft", "draft_identity", "loader", "model", "concurrency", "rounds")  # what two evaluations may differ in


def gather(args):
    """{"stages": {stage: done.json and flags}, "validation": rows} of the stages before; their pictures are copied."""
    folders = [*(sorted(args.tokens.parent.glob("0[123]_*")) if args.tokens else ()), args.draft]
    for picture in (p for f in folders for p in (*f.glob("coverage.png"), *f.glob("curves.png"))):
        shutil.copy(picture, args.out)
    held = args.draft / "validation.jsonl"
    return {"stages": {f.name: {**stage.done(f), "flags": (f / "args").read_text().split("\n")[0] if (f / "args").exists() else ""}
                       for f in folders if (f / "done.json").exists()},
            "validation": [row for _, row in read(held)] if held.exists() else []}


def write(out):
    """The report of a stage directory."""
    results = json.loads((out / "results.json").read_text())
    sets, plain, held = results["sets"], results["speeds"]["plain"], results["run"]["validation"]
    walked = results["walked"] if isinstance(results["walked"], dict) else {}
    charts.draw(out / "report.png",
                ("accepted up to proposal, of all verifications", {n: dict(enumerate(r["acceptance_by_position"], 1)) for n, r in sets.items()}, "bar"),
                ("acceptance length", {"the server": {name: r["acceptance_length"] for name, r in sets.items()},
                                       **{NAMES[draft]: by_set for draft, by_set in walked.items()}}, "bar"),
                ("tokens/s by requests in flight, of plain", {name: {n: r["tokens_per_s"] / plain[n]["tokens_per_s"] for n, r in by.items()}
                                                              for name, by in results["speeds"].items()}, "line"),
                *[("acceptance length by step, held out", {name: {row["step"]: row[name] for row in held} for name in ("acceptance", "ceiling")}, "line")]
                * bool(held))
    blocks = list(content(results, out))
    stage.write(out / "report.md", "\n\n".join(markdown(*block) for block in blocks) + "\n")
    stage.write(out / "report.html", "<!doctype html><meta charset=utf-8><title>Draft evaluation</title><style>body{font:16px/1.5 "
                "sans-serif;max-width:60em;margin:2em auto}td,th{border:1px solid #ccc;padding:.2em .6em}img{max-width:100%}</style>"
                + "\n".join(page(out, *block) for block in blocks))
    stage.write(out / "card.md", "\n\n".join(markdown(*block) for block in [("h2", "Measured"), *blocks[1:5]]) + "\n")


def content(results, out):
    """The report as blocks (kind, what), kind an HTML tag; of a table its rows, the first its head."""
    s, speeds, same, over = (results[name] for name in ("settings", "speeds", "lossless", "overlap"))
    drawn = results.get("temperature_1", "none were asked for")  # nor by the evaluations of earlier versions
    yield "h1", "Draft evaluation"
    yield "p", "  ".join(f"{n} in flight: " + ("" if a["setting"] else "do not use it, ") +
                         f"{'at best ' * (not a['setting'])}{a['speedup']:.2f} times as fast with {a['best']}." for n, a in results["advice"].items())
    yield "table", [["prompts", "answered", "acceptance length", "95 %", "up to proposal 1, 2 ..", "of those before", "mean of means",
                     "tokens/s plain", "with draft", "identical"], *(
        [name, f"{r['prompts']} of {r['asked']}", f"**{r['acceptance_length']:.2f}**", f"{r['interval'][0]:.2f} to {r['interval'][1]:.2f}",
         shares(r["acceptance_by_position"]), shares(r["conditional_acceptance"]), f"{r['mean_of_means']:.2f}",
         r["tokens_per_s_baseline"], r["tokens_per_s"], f"{r['identical_outputs']:.0%}"]
        for name, r in {**results["sets"], "all": results}.items())]
    yield "p", (f"Acceptance length {results['acceptance_length']:.2f} with the target's own (bonus) token, {results['accepted_per_verification']:.2f} "
                f"accepted proposals without it, pooled over all verifications; 95 %: of draws of other prompts.  {s['engine']}, {s['dtype']}, "
                f"{s['steps']} proposals, top-k {s['top_k']}, {s['draft_tokens']} draft tokens, temperature 0.")
    yield "p", (f"Answers in {same.get('dtype', s['dtype'])} that equal the plain ones: {same['same']}; that part at a near tie "
                f"(two tokens within {same['tie']} nats, which rounding decides): {same['near_ties']}; for no such reason: {same['different']}" + ", so this is NOT LOSSLESS." * (same["different"] > 0))
    if isinstance(drawn, str):
        yield "p", f"Answers at temperature 1: {drawn}."
    else:
        yield "p", (f"{drawn['answers']} answers at temperature 1: with the draft {drawn['nats_with_draft']:.3f} nats a token by the plain target's count, "
                    f"without {drawn['nats_plain']:.3f}; without influence of the draft they would differ as much with a probability of {drawn['p']:.2g}"
                    + ", so THE DRAFT CHANGES WHAT IS DRAWN." * (not drawn["same"]) + "." * drawn["same"])
    yield "p", (f"Left out, being in the training rows: {len(over['same'])} prompts; kept, with half of their 13-grams in them: {len(over['near'])}."
                if over["checked"] else "Whether the draft was trained on these prompts is not known.")
    yield "img", "report.png"
    yield "h2", "Speed and settings"
    yield "table", [["in flight", "steps-topk-tokens", "tokens/s", "of plain", "spread", "ms a token", "ms to the first", "answered",
                     "acceptance length"], *(
        [n, name, r["tokens_per_s"], f"{r['tokens_per_s'] / speeds['plain'][n]['tokens_per_s']:.2f}",
         "" if r["spread"] is None else f"{r['spread']:.1%}", r["ms_per_token"], r["ms_to_first_token"], f"{r['answered']} of {r['requests']}",
         results["by_setting"].get(name, {}).get("acceptance_length", "")] for n in speeds["plain"] for name, by in speeds.items() for r in [by[n]])]
    for n, a in results["advice"].items():
        if a["setting"]:
            yield "p", f"To serve {n} requests at a time:"
            yield "pre", " ".join(["python -m sglang.launch_server --model-path", s["model"], "--dtype", s["dtype"], "--max-running-requests", n,
                                   *draft_flags(s["draft"], a["setting"])])
    yield "h2", "Trained against served"
    if isinstance(results["walked"], str):
        yield "p", f"The answers were not walked with the trainer's model: {results['walked']}."
    else:
        yield "p", "The same greedy answers walked offline, acceptance length within them; the trainer's model must agree with the server."
        yield "table", [["draft", *results["sets"]], ["the server", *(r["within_answers"] for r in results["sets"].values())],
                        *([NAMES[draft], *by_set.values()] for draft, by_set in results["walked"].items())]
    yield from (("img", name) for name in ("curves.png", "coverage.png") if (out / name).exists())
    yield "h2", "How it was made"
    yield "table", [["stage", "rows in", "rows out", "dropped", "tokens", "hours", "commit", "flags"], *(
        [name, d.get("rows_in"), d.get("rows_out"), json.dumps(d.get("dropped", {})), d.get("tokens"), f"{d.get('seconds', 0) / 3600:.2f}",
         d.get("commit"), d["flags"]] for name, d in results["run"]["stages"].items())]
    yield "table", [["setting", "value"], *([k, v if isinstance(v, str) else json.dumps(v)] for k, v in s.items())]


def shares(values):
    return " / ".join(f"{v:.2f}" for v in values)


def markdown(kind, what):
    if kind == "table":
        rows = ["| " + " | ".join("" if c is None else str(c).replace("|", "\\|").replace("<", "\\<") for c in row) + " |" for row in what]
        return "\n".join([rows[0], "|---" * len(what[0]) + "|", *rows[1:]])
    return {"h1": f"# {what}", "h2": f"## {what}", "pre": f"    {what}", "img": f"![{what}]({what})"}.get(kind, what)


def page(out, kind, what):
    if kind == "table":
        return "<table>" + "".join("<tr>" + "".join(f"<td>{'' if v is None else html.escape(str(v).strip('*'))}" for v in row) for row in what) + "</table>"
    if kind == "img":
        return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode((out / what).read_bytes()).decode()}">'
    return f"<{kind}>{html.escape(what)}</{kind}>"


def compare(folders):
    """A table of several evaluations; Refused if they differ in more than the draft."""
    found = {str(folder): json.loads((folder / "results.json").read_text()) for folder in folders}
    first, *others = ((name, {k: v for k, v in r["settings"].items() if k not in DRAFT}) for name, r in found.items())
    for name, settings in others:
        if different := [f"{k} {first[1].get(k)} and {settings.get(k)}" for k in settings if first[1].get(k) != settings[k]]:
            raise stage.Refused(f"{first[0]} and {name} can't be compared: {'; '.join(different)}")
    return markdown("table", [["evaluation", "acceptance length", "95 %", "speed-up", "identical"], *(
        [name, r["acceptance_length"], shares(r["interval"]), r["speedup"], r["identical_outputs"]] for name, r in found.items())])


def main():
    p = stage.arguments(__doc__)
    p.add_argument("folders", type=Path, nargs="+", help="05's directories")
    folders = p.parse_args().folders
    for folder in folders:
        if not (folder / "results.json").exists():
            raise stage.Refused(f"{folder} holds no results.json: make eval")
    if len(folders) > 1:
        print(compare(folders))
    else:
        write(folders[0])
        print(f"{folders[0]}/report.html")


if __name__ == "__main__":
    stage.run(main)
