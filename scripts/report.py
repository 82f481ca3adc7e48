"""What a draft is worth, from results.json alone: report.md, and report.html with its pictures inside.  Of several: one table.

Example
    python scripts/report.py runs/try/base/05_eval
    python scripts/report.py runs/try/base/05_eval runs/try/hot/05_eval      compared, where they can be

Reads   results.json and pictures of stage directories of 05
Writes  report.md, report.html, *.png beside them; the table of several to stdout
"""
import argparse
import base64
import html
import json
import shutil
from pathlib import Path

import stage
from jsonl import read

NAMES = {"trained": "this draft, by the trainer's model", "untrained": "an untrained draft", "most_frequent_token": "the most frequent token, always"}
ALIKE = ("steps", "top_k", "draft_tokens", "sampling", "dtype", "rows", "engine", "device", "target", "chat_template_kwargs", "sets")


def gather(args):
    """What the stages before tell of themselves: {"stages": {stage: its done.json and flags}, "validation": rows}; their pictures are copied."""
    folders = [*(sorted(args.tokens.parent.glob("0[123]_*")) if args.tokens else []), args.draft]
    stages = {f.name: {**stage.done(f), "flags": (f / "args").read_text().split("\n")[0].strip("<>") if (f / "args").exists() else ""}
              for f in folders if (f / "done.json").exists()}
    for picture in (p for f in folders for p in (f / "coverage.png", f / "curves.png") if p.exists()):
        shutil.copy(picture, args.out)
    held = args.draft / "validation.jsonl"
    return {"stages": stages, "validation": [row for _, row in read(held)] if held.exists() else []}


def write(out):
    results = json.loads((out / "results.json").read_text())
    draw(results, out)
    blocks = list(content(results, out))
    stage.write(out / "report.md", "".join(map(markdown, blocks)))
    stage.write(out / "report.html", "<!doctype html><meta charset=utf-8><title>Draft evaluation</title><style>body{font:16px/1.5 sans-serif;"
                "max-width:60em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em}"
                "img{max-width:100%}pre{background:#f4f4f4;padding:1em;overflow:auto}</style>" + "".join(page(block, out) for block in blocks))
    stage.write(out / "card.md", f"# EAGLE-3 draft for {Path(results['settings']['model']).name}\n" + "".join(map(markdown, blocks[1:5])))


def content(results, out):
    """The report as blocks: (kind, what).  Kinds: title, head, text, code, table (rows, the first is the head), picture."""
    s, speeds, most = results["settings"], results["speeds"], str(max(results["settings"]["concurrency"]))
    yield "title", "Draft evaluation"
    yield "text", "  ".join(f"{n} in flight: {verdict(a)}." for n, a in results["advice"].items())
    yield "head", "Acceptance"
    yield "text", (f"Acceptance length, pooled over all verifications: {results['acceptance_length']:.2f} with the target's own (bonus) token, "
                   f"{results['accepted_per_verification']:.2f} accepted proposals without it.  In brackets 95 % of draws of other prompts.  "
                   f"{s['steps']} proposals, top-k {s['top_k']}, {s['draft_tokens']} draft tokens, temperature 0.")
    yield "table", [["prompts", "answered", "acceptance length", "proposal 1 / 2 / 3 accepted", "of those before", "mean of means", "identical"], *(
        [name, f"{r['prompts']} of {r['asked']}", f"{r['acceptance_length']:.2f} ({r['interval'][0]:.2f} to {r['interval'][1]:.2f})",
         shares(r["acceptance_by_position"]), shares(r["conditional_acceptance"]), f"{r['mean_of_means']:.2f}", f"{r['identical_outputs']:.0%}"]
        for name, r in {**results["sets"], "all": results}.items())]
    yield "picture", "acceptance.png"
    same = results["lossless"]
    yield "text", (f"Same output in {s['dtype']}: {same['same']} answers equal the plain ones, {same['near_ties']} part at a near tie (two tokens "
                   f"within {same['tie']} nats, which rounding decides), {same['different']} for no such reason" +
                   ("; that is NOT LOSSLESS: see first_differences in results.json." if same["different"] else "."))
    over = results["overlap"]
    yield "text", (f"Left out, since a training row begins with them: {len(over['same'])} prompts.  Kept though half of their 13-grams are in training "
                   f"rows: {len(over['near'])}." if over["checked"] else "The training rows are unknown: whether the draft has seen these prompts was not checked.")
    yield "head", "Speed"
    yield "table", [["in flight", "setting", "tokens/s", "of plain", "spread", "ms a token", "ms to the first", "requests", "acceptance length"], *(
        [n, name, f"{r['tokens_per_s']:.0f}", f"{r['tokens_per_s'] / speeds['plain'][n]['tokens_per_s']:.2f}", f"{r['spread']:.1%}",
         r["ms_per_token"], r["ms_to_first_token"], r["requests"] + r["failed"],
         f"{results['by_setting'][name]['acceptance_length']:.2f}" if name != "plain" else ""]
        for n in speeds["plain"] for name, by in speeds.items() for r in [by[n]])]
    yield "picture", "speed.png"
    yield "text", (f"Settings are steps-topk-tokens.  Servers of each: {s['rounds']}, in turn; spread: between them"
                   f"{'' if s['rounds'] > 1 else ', unknown with one'}.  By sets at {most} in flight: " + "; ".join(
                       f"{name} {r['tokens_per_s_baseline']:.0f} plain, {r['tokens_per_s']:.0f} with the draft" for name, r in results["sets"].items()) + ".")
    for n, a in results["advice"].items():
        if a["setting"]:
            yield "text", f"With {n} in flight:"
            yield "code", command(s, a["setting"], n)
    yield "head", "Trained against served"
    if isinstance(results["walked"], str):
        yield "text", f"The answers were not walked with the trainer's model; {results['walked']}."
    else:
        yield "text", "The same greedy answers, walked offline (acceptance length); the second line must agree with the first."
        yield "table", [["draft", *results["sets"]], ["served", *(f"{r['acceptance_length']:.2f}" for r in results["sets"].values())],
                        *([NAMES[draft], *(f"{by_set[name]:.2f}" for name in results["sets"])] for draft, by_set in results["walked"].items())]
        yield "picture", "walked.png"
    for title, pictures in (("Training", ("held_out.png", "curves.png")), ("Coverage of the draft vocabulary", ("coverage.png",))):
        if there := [p for p in pictures if (out / p).exists()]:
            yield "head", title
            yield from (("picture", p) for p in there)
    yield "head", "How it was made"
    if results["run"]["stages"]:
        yield "table", [["stage", "rows in", "rows out", "dropped", "tokens", "hours", "commit", "flags"], *(
            [name, d.get("rows_in"), d.get("rows_out"), ", ".join(f"{r} {k}" for r, k in d.get("dropped", {}).items()) or "none", d.get("tokens", ""),
             f"{d.get('seconds', 0) / 3600:.2f}", d.get("commit"), d["flags"]] for name, d in results["run"]["stages"].items())]
    yield "table", [["setting", "value"], *([k, json.dumps(v) if isinstance(v, dict | list) else v] for k, v in s.items())]


def verdict(a):
    if a["setting"]:
        return f"serve with {a['setting']}, {a['speedup']:.2f} times as fast"
    return f"do not use it (at best {a['speedup']:.2f} times as fast, with {a['best']})"


def shares(values):
    return " / ".join(f"{v:.2f}" for v in values)


def command(settings, setting, flight):
    from sglang_server import draft_flags

    return (f"python -m sglang.launch_server --model-path {settings['model']} --dtype {settings['dtype']} --max-running-requests {flight} "
            + " ".join(draft_flags(settings["draft"], setting)))


def markdown(block):
    kind, what = block
    if kind == "table":
        rows = ["| " + " | ".join(str("" if c is None else c).replace("|", "\\|").replace("\n", " ") for c in row) + " |" for row in what]
        return "\n".join([rows[0], "|---" * len(what[0]) + "|", *rows[1:]]) + "\n\n"
    return {"title": f"# {what}\n\n", "head": f"## {what}\n\n", "text": f"{what}\n\n", "code": f"    {what}\n\n",
            "picture": f"![{Path(what).stem}]({what})\n\n"}[kind]


def page(block, out):
    kind, what = block
    if kind == "table":
        return "<table>" + "".join("<tr>" + "".join(f"<{c}>{html.escape(str('' if v is None else v))}</{c}>" for v in row) + "</tr>"
                                   for row, c in zip(what, ["th"] + ["td"] * len(what))) + "</table>\n"
    if kind == "picture":
        return f'<p><img alt="{Path(what).stem}" src="data:image/png;base64,{base64.b64encode((out / what).read_bytes()).decode()}"></p>\n'
    tag = {"title": "h1", "head": "h2", "text": "p", "code": "pre"}[kind]
    return f"<{tag}>{html.escape(what)}</{tag}>\n"


def draw(results, out):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    def save(name, **labels):
        axes.set(**labels)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(out / name, dpi=100)
        pyplot.close(figure)

    def bars(groups, ticks):
        for k, (name, values) in enumerate(groups.items()):
            drawn = axes.bar([x + k * 0.8 / len(groups) for x in range(len(values))], values, 0.8 / len(groups), align="edge", label=name)
            axes.bar_label(drawn, fmt="%.2f", fontsize=8)
        axes.set_xticks([x + 0.4 for x in range(len(ticks))], ticks)

    sets = results["sets"]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    bars({f"{name}: {r['acceptance_length']:.2f}": r["acceptance_by_position"] for name, r in sets.items()}, [1, 2, 3])
    save("acceptance.png", xlabel="proposal", ylabel="accepted up to it, of all verifications", ylim=(0, 1))
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, by in results["speeds"].items():
        axes.plot(list(by), [r["tokens_per_s"] / results["speeds"]["plain"][n]["tokens_per_s"] for n, r in by.items()], "o-", label=name)
    save("speed.png", xlabel="requests in flight", ylabel="tokens/s, of plain")
    if not isinstance(results["walked"], str):
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        bars({"served": [r["acceptance_length"] for r in sets.values()],
              **{NAMES[draft]: [by_set[name] for name in sets] for draft, by_set in results["walked"].items()}}, list(sets))
        save("walked.png", ylabel="acceptance length")
    if held := results["run"]["validation"]:
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for name in ("acceptance", "ceiling"):
            axes.plot([row["step"] for row in held], [row[name] for row in held], "o-", label=name)
        save("held_out.png", xlabel="step", ylabel="acceptance length, held out, walked")


def compare(folders):
    """A table of several evaluations; Refused if they differ in more than the draft."""
    found = {str(folder): json.loads((folder / "results.json").read_text()) for folder in folders}
    first, *others = found.items()
    for name, results in others:
        if different := [f"{k} {first[1]['settings'][k]} and {results['settings'][k]}" for k in ALIKE if first[1]["settings"][k] != results["settings"][k]]:
            raise stage.Refused(f"{first[0]} and {name} can't be compared: {'; '.join(different)}")
    return markdown(("table", [["evaluation", "acceptance length", "95 %", "speed-up", "identical"], *(
        [name, r["acceptance_length"], f"{r['interval'][0]} to {r['interval'][1]}", r["speedup"], f"{r['identical_outputs']:.0%}"]
        for name, r in found.items())]))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", type=Path, nargs="+")
    folders = p.parse_args().folders
    for folder in folders:
        if not (folder / "results.json").exists():
            raise stage.Refused(f"{folder} holds no results.json: make eval")
    if len(folders) > 1:
        print(compare(folders), end="")
    else:
        write(folders[0])
        print(f"{folders[0]}/report.html")


if __name__ == "__main__":
    stage.run(main)
