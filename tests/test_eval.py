"""Figures of an evaluation against what is known by hand, failures that are counted, and drafts that are refused."""
import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from running import script

import chat
import measure
import questions
import tiny as model_maker
import walk
from stage import Refused


def row(accepted, tokens=10, first=0.1, seconds=1.0):
    return {"ids": list(range(tokens)), "accepted": accepted, "first": first, "seconds": seconds}


# --- acceptance --------------------------------------------------------------------------------------------------------

def test_the_pooled_length_differs_from_the_mean_of_means_as_by_hand():
    prompts = [{"set": "a", "id": "1"}, {"set": "a", "id": "2"}]
    rows = [row([0, 0, 0, 2]), row([8, 2])]                 # 2 verifications accept 3 each; 10 accept 2 in all
    found = measure.acceptance(prompts, rows, [0, 1])
    assert found["acceptance_length"] == round(1 + 8 / 12, 3) and found["mean_of_means"] == round((4 + 1.2) / 2, 3)
    assert found["accepted"] == [8, 2, 0, 2]
    assert found["acceptance_by_position"] == [round(4 / 12, 4), round(2 / 12, 4), round(2 / 12, 4)]
    assert found["conditional_acceptance"] == pytest.approx([4 / 12, 2 / 4, 1], abs=1e-3)


def test_what_is_accepted_past_the_end_of_an_answer_can_be_told_apart():
    """48 tokens: 1 by the prompt, then 13 verifications whose last accepts 3 where 2 end the answer; counted by a server, met here."""
    found = measure.acceptance([{"set": "a", "id": "1"}], [row([1, 0, 0, 12], 48)], [0])
    assert (found["acceptance_length"], found["within_answers"]) == (3.769, 3.692)


def test_ten_verifications_of_twelve_accepted_proposals_are_2_2_with_the_bonus_token_and_1_2_without():
    found = measure.acceptance([{"set": "a", "id": "1"}], [row([2, 5, 2, 1])], [0])
    assert (found["acceptance_length"], found["accepted_per_verification"]) == (2.2, 1.2)


@pytest.mark.parametrize("size", [80, 200])
def test_the_interval_covers_the_truth_in_92_to_97_of_100_draws(size):
    """500 evaluations drawn from a large one, which is the population; prompts differ in length and in how well they go."""
    chance = numpy.random.default_rng(1)
    verified, share = chance.integers(10, 150, 5000), chance.beta(2, 4, 5000)
    population = numpy.stack([verified, chance.binomial(3 * verified, share)], 1)
    truth = 1 + population[:, 1].sum() / population[:, 0].sum()
    covered = widths = 0
    for _ in range(500):
        low, high = walk.interval(population[chance.integers(0, 5000, size)].tolist(), draws=600)
        covered += low <= truth <= high
        widths += high - low
    assert 0.92 <= covered / 500 <= 0.97
    assert widths / 500 < 1.2 * (truth - 1) * 4 / size ** 0.5  # one that is always right is of no use


def test_prompts_are_drawn_within_their_sets():
    """Two sets without any spread of their own: no draw of prompts can change the pooled length."""
    assert walk.interval([(10, 0)] * 5 + [(10, 30)] * 5, ["a"] * 5 + ["b"] * 5) == [2.5, 2.5]
    assert walk.interval([(10, 0)] * 5 + [(10, 30)] * 5) != [2.5, 2.5]


# --- speed and advice ----------------------------------------------------------------------------------------------------

def test_speed_pools_rounds_and_tells_their_spread():
    prompts = [{"set": "a"}, {"set": "b"}]
    levels = [{"seconds": {"a": 1.0, "b": 1.0}, "rows": [row([], 11), row([], 9)]},
              {"seconds": {"a": 2.0, "b": 3.0}, "rows": [row([], 11, 0.2, 2.2), {"failed": "http 500"}]}]
    found = measure.speed(prompts, levels)
    assert found["tokens_per_s"] == round(31 / 7, 1) and found["spread"] == round((10 - 2.2) / 10, 3)
    assert (found["answered"], found["requests"]) == (3, 4) and found["ms_to_first_token"] == 100
    assert measure.speed(prompts, levels[:1])["spread"] is None
    assert measure.speed(prompts, levels, "a")["tokens_per_s"] == round(22 / 3, 1)


def speeds(**rates):
    return {name: {"8": {"tokens_per_s": rate, "spread": spread}} for name, (rate, spread) in rates.items()}


@pytest.mark.parametrize("rates, setting", [
    ({"3-1-4": (150, 0.01), "5-1-6": (170, 0.01), "plain": (100, 0.01)}, "5-1-6"),
    ({"3-1-4": (90, 0.01), "5-1-6": (80, 0.01), "plain": (100, 0.01)}, None),       # slower: do not use it
    ({"3-1-4": (110, 0.01), "plain": (100, 0.2)}, None),                            # a gain that is noise is none
    ({"3-1-4": (105, None), "plain": (100, None)}, None)])                          # of one round the noise is unknown
def test_the_advice_is_the_fastest_setting_or_none(rates, setting):
    assert measure.advice(speeds(**rates))["8"]["setting"] == setting


# --- requests that fail ----------------------------------------------------------------------------------------------------

class Engine(BaseHTTPRequestHandler):
    """Streams two events a request, as SGLang does; what the first id asks for goes wrong."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        kind, ids = body["input_ids"][0], [1, 2, 3]
        about = {"finish_reason": {"type": "abort" if kind == 1 else "length"}, "completion_tokens": 3, "spec_correct_drafts_histogram": [1, 1],
                 "output_token_ids_logprobs": [[[-0.1, 2, None], [-0.4, 7, None]]]}
        self.send_response(400 if kind == 2 else 200)
        self.end_headers()
        if kind == 3:
            self.wfile.write(b'data: {"error": {"message": "too long"}}\n\n')
        elif kind != 2:
            for part in (ids[:1], ids[:2] if kind == 4 else ids):
                self.wfile.write(f"data: {json.dumps({'output_ids': part, 'meta_info': about})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    from api import Api

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(api=Api(f"http://127.0.0.1:{server.server_port}"), bodies=server.bodies)
    server.shutdown()


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_an_answer_that_is_none_is_a_failure(engine, kind):
    assert "failed" in measure.ask(engine.api, [kind], 8) and len(engine.bodies) == 1


def test_three_of_ten_failures_are_counted_left_out_and_too_many(engine):
    rows = [measure.ask(engine.api, [kind], 8) for kind in (9, 9, 1, 9, 9, 2, 9, 3, 9, 9)]
    with pytest.raises(Refused, match="pass-1-plain: 3 of 10 requests failed, more than --max-failed 0.02"):
        measure.check(rows, 0.02, Path("pass-1-plain.json"))
    measure.check(rows, 0.3, Path("pass-1-plain.json"))
    level = {"seconds": {"a": 1.0, "b": 1.0}, "rows": rows}
    prompts, args = [{"set": "b" if k == 2 else "a", "id": str(k)} for k in range(10)], SimpleNamespace(eval_concurrency=[4], eval_dtype="float32", eval_sampled=0, out=Path("x"))
    results = measure.summarize(prompts, {name: [{"levels": {"4": level}, "differences": []}] for name in ("3-1-4", "plain")}, args)
    assert (results["prompts"], results["asked"]) == (7, 10) and results["accepted"] == [7, 7, 0, 0]
    assert (results["sets"]["b"]["prompts"], results["sets"]["b"]["asked"], results["sets"]["b"]["interval"]) == (0, 1, [1.0, 1.0])
    assert sum("failed" in r for r in results["rows"]) == 3


def test_each_answer_that_is_drawn_has_a_seed_of_its_own_and_failed_ones_are_too_many(engine):
    args, passes = SimpleNamespace(eval_sampled=3, max_failed=0.02), [Path(f"pass-1-{name}.json") for name in ("plain", "3-1-4")]
    good = [{"set": "a", "ids": [9]}, {"set": "a", "ids": [8]}]
    for path in passes:
        assert measure.sampled(engine.api, good, args, 2, path) == [(0, [[1, 2, 3]] * 3), (1, [[1, 2, 3]] * 3)]
    seeds = [body["sampling_params"]["sampling_seed"] for body in engine.bodies]
    assert len(seeds) == len(set(seeds)) == 12
    with pytest.raises(Refused, match="pass-1-plain: 3 of 6 requests failed, more than --max-failed 0.02"):
        measure.sampled(engine.api, [*good[:1], {"set": "a", "ids": [2]}], args, 2, passes[0])


def test_a_deadline_without_end_is_one_that_sockets_know(engine, monkeypatch):
    from api import Api

    monkeypatch.setenv("DEADLINE", "inf")
    assert measure.ask(Api(engine.api.url), [9], 8)["ids"] == [1, 2, 3]


@pytest.mark.parametrize("dtype, ties", [("float32", 1), ("bfloat16", 2)])
def test_only_a_gap_that_rounding_decides_is_a_near_tie(dtype, ties):
    level = {"seconds": {"a": 1.0}, "rows": [row([2, 5, 2, 1])] * 5}
    found = [{"prompt": k, "position": 1, "gap": gap} for k, gap in enumerate([0.005, -0.2, 3.0, None])]
    passes = {name: [{"levels": {"4": level}, "differences": found}] for name in ("3-1-4", "plain")}
    args = SimpleNamespace(eval_concurrency=[4], eval_dtype=dtype, eval_sampled=0, out=Path("x"))
    lossless = measure.summarize([{"set": "a", "id": str(k)} for k in range(5)], passes, args)["lossless"]
    assert (lossless["same"], lossless["near_ties"], lossless["different"]) == (1, ties, 4 - ties)


@pytest.mark.parametrize("shift, same", [(0.0, True), (0.5, False)])
def test_answers_that_are_likelier_than_the_targets_own_are_not_its_distribution(shift, same):
    chance = numpy.random.default_rng(5)
    by_prompt = chance.normal(-1.5, 0.6, 16)                            # prompts differ more than answers to one do
    plain = {name: [list(chance.normal(mean + more, 0.3, 8)) for mean in by_prompt]
             for name, more in (("nats_plain", 0.0), ("nats_drafted", shift))}
    found = measure.same_distribution(plain)
    assert found["same"] == same and abs(found["difference"] - shift) < 0.1 and (found["prompts"], found["answers"]) == (16, 128)


def test_prompts_whose_answers_at_temperature_1_are_not_known_do_not_count():
    plain = {"nats_drafted": [[-1.0, -2.0], [], [-1.0], [None]], "nats_plain": [[-1.0, None], [-3.0], [-1.5], [-2.0]]}
    found = measure.same_distribution(plain)
    assert (found["prompts"], found["answers"], found["difference"], found["same"]) == (2, 3, 0.0, True)
    assert measure.same_distribution({"nats_drafted": [[-1.0]], "nats_plain": [[-2.0]]})["same"]  # too little to say otherwise
    assert measure.same_distribution({"nats_drafted": [[-1.0]], "nats_plain": [[]]}) == "no prompt has any both with the draft and without"


@pytest.mark.parametrize("prompts, times", [(1, 8), (2, 4), (16, 8)])
def test_equal_distributions_are_seldom_called_different(prompts, times):
    """1 of 1,000 by design; 40 tries of each size gave none.  The means of few prompts with a normal's bounds: 1 of 6."""
    chance = numpy.random.default_rng(7)
    for _ in range(40):
        nats = [{name: chance.normal(-1.5, 0.6, times).tolist() for name in ("nats_drafted", "nats_plain")} for _ in range(prompts)]
        assert measure.same_distribution({name: [n[name] for n in nats] for name in nats[0]}, draws=2000)["same"]


def test_what_is_asked_is_explicit(engine):
    measure.ask(engine.api, [9], 8)
    assert engine.bodies[0]["sampling_params"].items() >= {**measure.SAMPLING, "max_new_tokens": 8}.items()
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"} <= measure.SAMPLING.keys()


def test_the_first_difference_is_weighed_by_the_plain_servers_own_probabilities(engine):
    assert measure.difference(engine.api, [9, 9], [5, 2, 3], [5, 7, 3]) == {"position": 1, "gap": pytest.approx(0.3)}
    assert engine.bodies[-1]["input_ids"] == [9, 9, 5] and engine.bodies[-1]["token_ids_logprob"] == [2, 7]
    assert measure.difference(engine.api, [9, 9], [5, 2], [5, 2, 3]) == {"position": 2, "gap": None}


# --- prompts -------------------------------------------------------------------------------------------------------------

def test_prompts_of_the_training_rows_are_found_and_the_templates_words_are_not(prepared, tiny):
    from datasets import load_from_disk

    rows = load_from_disk(prepared / "02_prepare" / "dataset").with_format(None)
    by_split = {split: next(r["input_ids"] for r in rows if r["split"] == split) for split in ("train", "val")}
    template, end = [1, 60, 61, 62] * 6, [2, 63, 64, 65] * 4
    middles = [by_split["train"][:40], by_split["val"][:40], by_split["train"][:30] + [9] * 10, [7, 8] * 20]
    prompts = [{"ids": template + m + end} for m in middles] + [{"ids": by_split["train"][:30]}]
    same, near = questions.seen(prompts, prepared / "02_prepare")
    assert (same, near) == ([4], [])     # with a template's words around it none is whole
    prompts = [{"ids": m} for m in middles]
    assert questions.seen(prompts, prepared / "02_prepare") == ([0], [2])


def test_the_contract_names_the_mode_of_most_rows(tiny, tmp_path):
    rows = model_maker.answer(tmp_path / "01_generate", 5, longest=22)
    for row_ in rows[:3]:
        row_["chat_template_kwargs"] = {"enable_thinking": True}
    (tmp_path / "01_generate/rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    script("02_prepare", "--answers", tmp_path / "01_generate", "--model", tiny, "--out", tmp_path / "02_prepare")
    assert json.loads((tmp_path / "02_prepare/contract.json").read_text())["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_prompt_is_rendered_in_the_mode_of_the_training_unless_it_brings_its_own(tiny, tmp_path):
    tokenizer = chat.load_tokenizer(tiny)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %}<T>{% endif %}"
    (tmp_path / "set.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "chat_template_kwargs": {"enable_thinking": false}}\n')
    found = questions.load(tmp_path / "set.jsonl", tokenizer, 5, {"enable_thinking": True})
    assert [tokenizer.decode(p["ids"]) for p in found] == ["a<T>", "b"]
    assert [tokenizer.decode(p["ids"]) for p in questions.load(tmp_path / "set.jsonl", tokenizer, 1, {})] == ["a"]


def test_a_set_that_the_hub_does_not_give_is_refused_in_one_sentence(tmp_path):
    said = script("embedded", "gsm8k", tmp_path / "gsm8k.jsonl", code=2, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "openai/gsm8k can't be had from the hub" in said and not (tmp_path / "gsm8k.jsonl").exists()


# --- the report ----------------------------------------------------------------------------------------------------------

@pytest.fixture
def evaluation(tmp_path):
    """evaluation(name, setting=value, ...): a directory of 05 with results made by hand."""
    def build(name, **changed):
        out = tmp_path / name
        out.mkdir()
        prompts = [{"set": "<b>set</b>", "id": "1"}]
        drafted, plain = {"seconds": {"<b>set</b>": 1.0}, "rows": [row([2, 5, 2, 1], 20)]}, {"seconds": {"<b>set</b>": 2.0}, "rows": [row([], 20)]}
        results = measure.summarize(prompts, {"3-1-4": [{"levels": {"8": drafted}}], "plain": [{"levels": {"8": plain}, "differences": []}]},
                                    SimpleNamespace(eval_concurrency=[8], eval_dtype="float32", eval_sampled=0, out=out))
        settings = {"steps": 3, "top_k": 1, "draft_tokens": 4, "sampling": measure.SAMPLING, "dtype": "float32", "concurrency": [8], "rounds": 1,
                    "engine": "sglang 1", "sets": {"set": "abc"}, "model": "models/t", "draft": "runs/d", "draft_identity": name, "loader": "ok"}
        results |= {"walked": "no target", "overlap": {"checked": False, "same": [], "near": []}, "settings": settings | changed,
                    "run": {"stages": {}, "validation": []}}
        (out / "results.json").write_text(json.dumps(results))
        return out
    return build


def test_the_page_holds_its_pictures_and_escapes_what_it_shows(evaluation):
    out = evaluation("a")
    script("report", out)
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert base64.b64decode(re.search(r'src="data:image/png;base64,([^"]+)"', page)[1]).startswith(b"\x89PNG")
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "<b>set" not in page and "&lt;b&gt;set" in page
    assert "2.20 with the target's own (bonus) token, 1.20 accepted proposals without it" in text
    assert "--speculative-draft-model-path runs/d --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert text.count("2.00 times as fast") == 1


def test_what_was_measured_alike_is_compared(evaluation):
    said = script("report", evaluation("a"), evaluation("b", rounds=2))
    assert said.count("| 2.2 | 2.20 / 2.20 | 2.0 | 1.0 |") == 2


@pytest.mark.parametrize("changed", [{"steps": 5}, {"top_k": 4}, {"draft_tokens": 8}, {"engine": "sglang 2"}, {"sets": {"set": "xyz"}}, {"dtype": "bfloat16"}])
def test_what_was_measured_otherwise_is_not_compared(evaluation, changed):
    said = script("report", evaluation("a"), evaluation("b", **changed), code=2)
    name, value = next(iter(changed.items()))
    assert "can't be compared" in said and name in said and str(value) in said


# --- drafts that can't be served -----------------------------------------------------------------------------------------

def test_pickled_weights_are_refused(tmp_path):
    import export

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(Refused, match="wanted a draft's config.json and safetensors"):
        export.adopt(tmp_path, tmp_path / "sglang", Path("nowhere"))
