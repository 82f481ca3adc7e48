"""01_generate through APIs that are slow, dear, wrong and cut off: faults, money, conversations, inputs, kills.

Example
    ROWS=10000 KILLS=10 python -m pytest tests/test_generate.py -k kills      # the full size of what CI does smaller
"""
import email.utils
import json
import os
import random
import subprocess
import sys
import time

import pytest

import stage
import tiny
from misbehaving import KEY, SCRIPTS, Reply, Server, answer, question, refusal, run, start

ALL = [f"p{k}" for k in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


def written(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def asking(count):
    return [{"id": f"p{k}", "prompt": f"question {k}?"} for k in range(count)]


@pytest.fixture
def flags(target, tmp_path):
    """flags(server, prompts): 01_generate's, for a list of rows, a file or a source in words."""
    def make(server, prompts, *more):
        if isinstance(prompts, list):
            prompts = written(tmp_path / "prompts.jsonl", prompts)
        url = ",".join(s.url for s in server) if isinstance(server, tuple) else server.url
        return ["--prompts", prompts, "--model", target, "--out", tmp_path / "01", "--api", url, "--api-model", "named", *more]
    return make


def read(out, name="rows"):
    path = out / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def well(n, body):
    return answer(f"the answer to {question(body)}")


def answered(flags, script, prompts, *more, **environment):
    """Run to the end: (done.json, rows by id, reasons by id, what was printed)."""
    with Server(script) as server:
        argv = flags(server, prompts, *more)
        code, printed = run("01_generate.py", *argv, **environment)
    assert code == 0, printed
    out = argv[argv.index("--out") + 1]
    rows, rejected = read(out), read(out, "rejected")
    assert len({r["id"] for r in rows}) == len(rows)
    return stage.done(out), {r["id"]: r for r in rows}, {r["id"]: r["reason"] for r in rejected}, printed


# --- answers that are none, and answers that are cut ------------------------------------------------------------------

def test_cut_answers_are_counted_and_kept_as_cut(flags):
    done, rows, _, printed = answered(flags, lambda n, b: answer("cut in the", "length") if n <= 7 else well(n, b), asking(20))
    assert done["cut"] == 7 and [r["finish_reason"] for r in rows.values()].count("length") == 7
    assert "7 of 20 answers were cut" in printed


NONE = {"content filter": answer("I", "content_filter"), "empty answer": answer(""), "only reasoning": answer("", "length", reasoning="long thoughts"),
        "broken off": answer("half an", None), "no choices": {"choices": [], "usage": {"completion_tokens": 1}},
        "answer loops": answer("and so on and on " * 20), "flagged": Reply({"error": {"code": 403, "message": "input was flagged",
        "metadata": {"reasons": ["violence"], "flagged_input": "..."}}}, 403)}
THOUGHT = answer("<think>\nlong thoughts that never end", "length")


@pytest.mark.parametrize("reason, reply", [*NONE.items(), ("only reasoning", THOUGHT)])
def test_what_is_no_answer_has_a_reason_of_its_own_and_ends_nothing(flags, reason, reply):
    done, rows, reasons, printed = answered(flags, lambda n, b: reply if question(b) == "question 0?" else well(n, b), asking(3))
    assert reasons == {"p0": reason} and sorted(rows) == ["p1", "p2"] and done["dropped"] == {reason: 1}
    assert reason != "only reasoning" or "--answer-tokens" in printed


def test_another_models_answers_are_rejected_and_if_all_are_the_stage_stops(flags, tmp_path):
    other = answer("no", reply={"model": "other/else-7b"})
    done, rows, reasons, _ = answered(flags, lambda n, b: other if question(b) == "question 0?" else well(n, b), asking(3))
    assert reasons == {"p0": "another model"} and len(rows) == 2
    with Server(lambda n, body: other) as server:
        argv = flags(server, asking(40))
        argv[argv.index("--out") + 1] = tmp_path / "all"
        code, printed = run("01_generate.py", *argv)
        assert code == 2 and "else-7b" in refusal(printed) and len(server.asked()) < 40
    assert read(tmp_path / "all") == read(tmp_path / "all", "rejected") == []


@pytest.mark.parametrize("broken", [Reply(answer(), part=0.5), Reply({"choices": [{"error": {"code": 502, "message": "provider"}}]}),
                                    Reply(b"<html>"), Reply({"error": {"message": "no code"}})], ids=["cut", "choice", "page", "no code"])
def test_a_reply_cut_short_or_an_error_in_a_200_is_asked_again(flags, broken):
    done, rows, reasons, _ = answered(flags, lambda n, b: broken if n == 1 else well(n, b), asking(2), CONCURRENCY="1")
    assert sorted(rows) == ["p0", "p1"] and not reasons


def test_a_prompt_that_always_fails_is_rejected_when_others_are_answered(flags):
    done, rows, reasons, _ = answered(flags, lambda n, b: 400 if question(b) == "question 1?" else well(n, b), asking(4))
    assert reasons == {"p1": "http 400"} and len(rows) == 3


def test_a_403_about_the_key_stops_at_once(flags, tmp_path):
    with Server(lambda n, body: 403) as server:
        code, printed = run("01_generate.py", *flags(server, asking(20)))
        assert code == 2 and "403" in refusal(printed) and len(server.asked()) <= 8
    assert read(tmp_path / "01", "rejected") == []


def test_one_length_for_many_answers_is_warned_of(flags):
    fifty = lambda n, b: answer(f"the answer to {question(b)}", usage={"completion_tokens": 50})  # noqa: E731
    done, *_, printed = answered(flags, fifty, asking(25))
    assert done["same_length"] == 50 and "exactly 50 tokens" in printed


def test_answers_of_many_lengths_are_not_warned_of(flags):
    done, *_, printed = answered(flags, lambda n, b: answer("yes", usage={"completion_tokens": 40 + n}), asking(25))
    assert "same_length" not in done and "exactly" not in printed


# --- waiting ----------------------------------------------------------------------------------------------------------

def times(server, text):
    return [at for at, _, body, _ in server.requests if question(body) == text]


@pytest.mark.parametrize("header", ["2", "date"])
def test_retry_after_is_kept_for_each_attempt_and_the_slot_serves_others_meanwhile(flags, header):
    def script(n, body):
        after = email.utils.formatdate(time.time() + 3, usegmt=True) if header == "date" else header  # a date has whole seconds
        busy = question(body) == "question 0?" and len(times(server, "question 0?")) <= 3
        return Reply({"error": "busy"}, 429, {"Retry-After": after}) if busy else well(n, body)

    with Server(script) as server:
        code, printed = run("01_generate.py", *flags(server, asking(4)), CONCURRENCY="1")
        assert code == 0, printed
    asked = times(server, "question 0?")
    assert len(asked) == 4 and all(b - a >= 2 for a, b in zip(asked, asked[1:]))
    assert max(times(server, f"question {k}?")[0] for k in (1, 2, 3)) < asked[1]


def test_a_server_that_stays_busy_is_asked_as_often_as_the_limit_says_and_the_prompt_stays_pending(flags, tmp_path):
    with Server(lambda n, body: 429) as server:
        process = start("01_generate.py", *flags(server, asking(1)))
        assert process.wait(90) == 2 and "6 times in a row, last with http 429" in refusal(process.log)
        gaps = [b - a for a, b in zip(times(server, "question 0?"), times(server, "question 0?")[1:])]
    assert len(gaps) == 5 and all(later > earlier for earlier, later in zip(gaps, gaps[1:]))
    assert read(tmp_path / "01", "rejected") == []


def test_a_time_out_is_one_row_and_reported_as_unaccounted(flags):
    done, rows, _, printed = answered(flags, lambda n, b: Reply(well(n, b), delay=3.0 if n == 1 else 0.0), asking(1), DEADLINE="1")
    assert len(rows) == 1 and done["unaccounted"] == 1 and done["retried"] == {"timed out": 1} and "unaccounted: 1 request" in printed


def test_a_deadline_holds_for_the_whole_reply_and_not_for_one_read(flags):
    done, rows, _, _ = answered(flags, lambda n, b: Reply(well(n, b), drip=0.3 if n == 1 else 0.0), asking(1), DEADLINE="1.5")
    assert len(rows) == 1 and done["retried"] == {"timed out": 1}


def test_requests_and_tokens_a_minute_are_kept(flags, tmp_path):
    with Server(well) as server:
        assert run("01_generate.py", *flags(server, asking(11)), RPM="600")[0] == 0
    at = [t for t, *_ in server.requests]
    assert at[-1] - at[0] >= 0.95
    with Server(lambda n, b: answer("yes", usage={"completion_tokens": 100})) as server:
        argv = flags(server, asking(11), "--answer-tokens", "100")
        argv[argv.index("--out") + 1] = tmp_path / "tokens"
        assert run("01_generate.py", *argv, TPM="60000")[0] == 0
    at = [t for t, *_ in server.requests]
    assert at[-1] - at[0] >= 0.95


def test_the_level_grows_while_the_server_keeps_up_and_gives_way_when_it_does_not(flags, tmp_path):
    most = {}
    for room in (1000, 20):
        def script(n, body):
            return 429 if server.now > room else Reply(well(n, body), delay=0.1)
        with Server(script) as server:
            argv = flags(server, asking(400))
            argv[argv.index("--out") + 1] = tmp_path / str(room)
            code, printed = run("01_generate.py", *argv, CONCURRENCY="")
            assert code == 0 and len(read(tmp_path / str(room))) == 400, printed
            first = [body for _, _, body, _ in server.requests[:8]]
            most[room] = server.most, len(server.requests), len(first)
    assert most[1000][0] > 24 and most[1000][1] == 400                 # from 8 on, far enough to tell, and nothing asked twice
    assert most[20][1] < 400 + 100                                     # refusals stay the exception


# --- money ------------------------------------------------------------------------------------------------------------

def dollar(n, body):
    return answer("yes", usage={"prompt_tokens": 10, "completion_tokens": 100, "cost": 0.01})


def test_costs_that_replies_tell_are_summed_in_the_line_and_in_done(flags):
    done, rows, _, printed = answered(flags, dollar, asking(20))
    assert done["cost"] == pytest.approx(0.20) and rows["p3"]["cost"] == 0.01 and "cost $0.2000" in printed
    assert (done["prompt_tokens"], done["completion_tokens"], done["unaccounted"]) == (200, 2000, 0)


def test_given_prices_are_dollars_a_million_tokens(flags):
    reply = lambda n, b: answer("yes", usage={"prompt_tokens": 1000, "completion_tokens": 500})  # noqa: E731
    done, *_ = answered(flags, reply, asking(4), "--prices", "0.5,2")
    assert done["cost"] == pytest.approx(4 * (0.0005 + 0.001))


def test_a_rejected_answer_is_paid_for_too(flags):
    empty = answer("", usage={"cost": 0.03})
    done, *_ = answered(flags, lambda n, b: empty if question(b) == "question 0?" else dollar(n, b), asking(3))
    assert done["cost"] == pytest.approx(0.05)


@pytest.mark.parametrize("prices", [(), ("--prices", "0,100")], ids=["told", "given"])
def test_max_cost_is_never_passed_and_the_rest_is_asked_when_it_is_raised(flags, tmp_path, prices):
    """A reply costs 0.01: 100 tokens, as many as are allowed, at 100 dollars a million."""
    out = tmp_path / "01"
    with Server(lambda n, b: Reply(dollar(n, b), delay=0.05)) as server:
        argv = flags(server, asking(40), "--answer-tokens", "100", *prices)
        code, printed = run("01_generate.py", *argv, "--max-cost", "0.20", CONCURRENCY="16")
        assert code == 2 and "--max-cost" in refusal(printed), printed
        sent = len(server.asked())
        assert sent * 0.01 <= 0.20 + 1e-9 and len(read(out)) == sent >= 8
        code, printed = run("01_generate.py", *argv, "--max-cost", "10", CONCURRENCY="16")
        assert code == 0 and len(server.asked()) == 40, printed
    assert stage.done(out)["cost"] == pytest.approx(0.40)


def test_max_cost_without_any_price_is_refused(flags):
    with Server(well) as server:
        code, printed = run("01_generate.py", *flags(server, asking(20)), "--max-cost", "1")
        assert code == 2 and "--prices" in refusal(printed) and len(server.asked()) == 1


# --- conversations ----------------------------------------------------------------------------------------------------

def test_a_later_turn_is_asked_with_the_new_answers_before_it(flags):
    talk = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one?"}, {"role": "assistant", "content": "old"},
            {"role": "user", "content": "two?"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "three?"}]
    seen = []

    def script(n, body):
        seen.append([m["content"] for m in body["messages"]])
        return answer(f"answer-{n}", usage={"prompt_tokens": n, "cost": 0.5})

    done, rows, _, _ = answered(flags, script, [{"id": "t", "messages": talk}])
    assert seen == [["be short", "one?"], ["be short", "one?", "answer-1", "two?"],
                    ["be short", "one?", "answer-1", "two?", "answer-2", "three?"]]
    assert [m["content"] for m in rows["t"]["messages"]] == [*seen[2], "answer-3"]
    assert rows["t"]["usage"]["prompt_tokens"] == 6 and rows["t"]["cost"] == done["cost"] == 1.5


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]


def call(name, arguments, id):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TALK = [{"role": "user", "content": "Rain in Bern?"}, {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city": "Bern"}', "old-1")]},
        {"role": "tool", "tool_call_id": "old-1", "content": "rain"}, {"role": "assistant", "content": "old"}]


def test_tool_calls_are_answered_anew_and_their_results_follow_the_new_calls(flags):
    def script(n, body):
        assert body["tools"] == TOOLS
        if body["messages"][-1]["role"] == "user":
            return answer(None, "tool_calls", tool_calls=[call("weather", '{"city":"Bern"}', "new-1")], reasoning="look it up")
        assert body["messages"][-1] == {"role": "tool", "tool_call_id": "new-1", "content": "rain"}
        assert body["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [call("weather", '{"city":"Bern"}', "new-1")]}
        return answer("Yes.")

    _, rows, _, _ = answered(flags, script, [{"id": "t", "messages": TALK, "tools": json.dumps(TOOLS)}])
    asked, called, result, said = rows["t"]["messages"]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "new-1" and called["reasoning_content"] == "look it up"
    assert said == {"role": "assistant", "content": "Yes."} and rows["t"]["tools"] == TOOLS


def test_a_conversation_ends_where_the_recorded_tool_result_would_be_no_reply(flags):
    done, rows, _, _ = answered(flags, lambda n, b: answer("I can't know."), [{"id": "t", "messages": TALK, "tools": TOOLS}])
    assert [m["role"] for m in rows["t"]["messages"]] == ["user", "assistant"] and done["shortened"] == 1


def test_a_later_turn_that_fails_leaves_the_answers_before_it(flags):
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "two?"}]
    done, rows, reasons, _ = answered(flags, lambda n, b: 400 if len(b["messages"]) > 1 else answer("yes"), [{"id": "t", "messages": talk}])
    assert [m["content"] for m in rows["t"]["messages"]] == ["one?", "yes"] and rows["t"]["ended"] == "http 400" and not reasons


@pytest.mark.parametrize("message", [{"content": "Yes.", "reasoning": "hm"}, {"content": "Yes.", "reasoning_content": "hm"},
                                     {"content": "<think>\nhm\n</think>\n\nYes."}, {"content": "hm\n</think>\n\nYes."}])
def test_reasoning_has_a_field_of_its_own_wherever_it_came(flags, message):
    _, rows, _, _ = answered(flags, lambda n, b: answer(message["content"], **{k: v for k, v in message.items() if k != "content"}), asking(1))
    assert rows["p0"]["messages"][-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


def test_a_kill_between_two_turns_costs_the_turn_in_flight_and_no_other(flags, tmp_path):
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "two?"}]
    with Server(lambda n, b: Reply(answer(f"answer-{n}", usage={"cost": 1.0}), delay=30.0 if n == 2 else 0.0)) as server:
        argv = flags(server, [{"id": "t", "messages": talk}])
        process = start("01_generate.py", *argv)
        server.wait_for(lambda: len(server.requests) == 2)
        process.kill()
        assert run("01_generate.py", *argv)[0] == 0
        assert server.asked() == ["one?", "two?", "two?"]
    done = stage.done(tmp_path / "01")
    assert (done["cost"], done["unaccounted"]) == (2.0, 1)
    assert [m["content"] for m in read(tmp_path / "01")[0]["messages"]] == ["one?", "answer-1", "two?", "answer-3"]


# --- what is asked ----------------------------------------------------------------------------------------------------

def test_what_is_passed_through_reaches_the_api_and_what_answered_is_kept(flags):
    seen = []

    def script(n, body):
        seen.append(body)
        return answer("yes", reply={"provider": "Novita"})

    _, rows, _, _ = answered(flags, script, asking(1), "--pin-provider", "novita/fp8,deepinfra", "--reasoning", "low",
                             "--extra-body", "top_k=20,chat_template_kwargs.enable_thinking=false,seed=x")
    assert seen == [{"model": "named", "messages": [{"role": "user", "content": "question 0?"}], "temperature": 0.7, "top_p": 1.0,
                     "max_tokens": 2048, "provider": {"only": ["novita/fp8", "deepinfra"], "allow_fallbacks": False},
                     "reasoning": {"effort": "low"}, "top_k": 20, "chat_template_kwargs": {"enable_thinking": False}, "seed": "x"}]
    assert rows["p0"]["provider"] == "Novita" and rows["p0"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert (rows["p0"]["model"], rows["p0"]["temperature"], rows["p0"]["top_p"], rows["p0"]["max_tokens"]) == ("named-0428", 0.7, 1.0, 2048)


def test_temperatures_are_dealt_by_the_id_alone(flags, tmp_path):
    _, rows, _, _ = answered(flags, well, asking(20), "--temperature", "0,0.7,1")
    out, (_, again, _, _) = tmp_path / "01", (None, None, None, None)
    out.rename(tmp_path / "first")
    _, again, _, _ = answered(flags, well, asking(20)[::-1], "--temperature", "0,0.7,1")
    assert {k: r["temperature"] for k, r in rows.items()} == {k: r["temperature"] for k, r in again.items()}
    assert {r["temperature"] for r in rows.values()} == {0, 0.7, 1}


@pytest.mark.parametrize("changed", [("--temperature", "1"), ("--answer-tokens", "4096"), ("--api-model", "other"), "input"])
def test_another_setting_or_input_is_refused_at_resume(flags, tmp_path, changed):
    with Server(lambda n, body: 401 if n == 6 else well(n, body)) as server:
        argv = flags(server, asking(20), "--temperature", "0")
        assert run("01_generate.py", *argv, CONCURRENCY="1")[0] == 2
        before = (tmp_path / "01" / "rows.jsonl").read_bytes()
        again = flags(server, asking(20)[::-1], "--temperature", "0") if changed == "input" else [*argv, *changed]
        code, printed = run("01_generate.py", *again)
        assert code == 2 and "was made by another command" in refusal(printed) and len(server.asked()) == 6
    assert (tmp_path / "01" / "rows.jsonl").read_bytes() == before


def test_a_last_line_that_lacks_only_its_newline_is_kept(flags, tmp_path):
    rows = tmp_path / "01" / "rows.jsonl"
    with Server(lambda n, body: 401 if n == 6 else well(n, body)) as server:
        argv = flags(server, asking(20))
        assert run("01_generate.py", *argv, CONCURRENCY="1")[0] == 2
        rows.write_bytes(rows.read_bytes()[:-1])
        assert run("01_generate.py", *argv)[0] == 0 and len(server.asked()) == 6 + 15
    assert sorted(r["id"] for r in read(tmp_path / "01")) == sorted(ALL)


def test_a_slow_prompt_is_asked_once_more_after_a_kill_and_no_other(flags, tmp_path):
    with Server(lambda n, b: Reply(well(n, b), delay=20.0 if question(b) == "question 3?" and n < 11 else 0.0)) as server:
        process = start("01_generate.py", *flags(server, asking(10)), CONCURRENCY="2")
        server.wait_for(lambda: server.replied >= 5 and len(read(tmp_path / "01")) >= 5)
        process.kill()
        stored = {r["id"] for r in read(tmp_path / "01")}
        before = len(server.asked())
        code, printed = run("01_generate.py", *flags(server, asking(10)))
        assert code == 0, printed
        assert not {f"question {i[1:]}?" for i in stored} & set(server.asked()[before:])
    assert sorted(r["id"] for r in read(tmp_path / "01")) == [f"p{k}" for k in range(10)]


def test_characters_that_end_lines_elsewhere_stay_in_their_prompt_and_answer(flags):
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf"
    done, rows, _, _ = answered(flags, lambda n, b: answer(question(b) + odd), [{"id": f"x{k}{odd}", "prompt": odd + str(k)} for k in range(5)])
    assert done["rows_in"] == done["rows_out"] == 5
    assert all(r["messages"][1]["content"] == r["messages"][0]["content"] + odd for r in rows.values())


# --- inputs -----------------------------------------------------------------------------------------------------------

FORMS = [{"id": "chat", "messages": [{"role": "user", "content": "one?"}]},
         {"id": "sharegpt", "conversations": [{"from": "system", "value": "be short"}, {"from": "human", "value": "two?"}, {"from": "gpt", "value": "old"}]},
         {"id": "single", "prompt": "three?", "system": "be long", "source": "ours"}]


def forms(rows):
    assert rows["chat"]["messages"] == [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "the answer to one?"}]
    assert [(m["role"], m["content"]) for m in rows["sharegpt"]["messages"]] == [("system", "be short"), ("user", "two?"), ("assistant", "the answer to two?")]
    assert [m["role"] for m in rows["single"]["messages"]] == ["system", "user", "assistant"] and rows["single"]["source"] == "ours"


def test_every_form_of_prompt_is_understood(flags):
    forms(answered(flags, well, FORMS)[1])


@pytest.mark.parametrize("source", ["parquet", "hf"])
def test_parquet_files_and_data_sets_by_name_are_read(flags, tmp_path, source):
    from datasets import Dataset

    tools = {**FORMS[0], "id": "tools", "messages": TALK[:1], "tools": json.dumps(TOOLS)}
    (tmp_path / "set").mkdir()
    keys = {k: None for row in (*FORMS, tools) for k in row}
    Dataset.from_list([keys | row for row in (*FORMS, tools)]).to_parquet(tmp_path / "set" / "train.parquet")
    _, rows, _, _ = answered(flags, well, tmp_path / "set" / "train.parquet" if source == "parquet" else f"hf:{tmp_path}/set:train")
    forms(rows)
    assert rows["tools"]["tools"] == TOOLS and len(rows) == 4


def test_a_data_set_that_is_not_there_is_refused(flags):
    with Server(well) as server:
        code, printed = run("01_generate.py", *flags(server, "hf:nobody/nothing"))
        assert code == 2 and "hf:nobody/nothing can't be read" in refusal(printed) and "HF_HUB_OFFLINE" in printed


def test_exact_duplicates_are_dropped_and_counted_with_and_without_ids(flags):
    rows = [{"id": "a", "prompt": "same?"}, {"id": "b", "prompt": "same?"}, {"prompt": "other?"}, {"prompt": "other?"}, {"prompt": "same?", "system": "s"}]
    done, found, reasons, _ = answered(flags, well, rows)
    assert (done["rows_in"], done["rows_out"], done["dropped"]) == (5, 3, {"duplicate prompt": 2}) and reasons["b"] == "duplicate prompt"


def test_a_role_that_no_template_knows_is_refused_with_its_line(flags, tmp_path):
    with Server(well) as server:
        code, printed = run("01_generate.py", *flags(server, [*asking(2), {"messages": [{"role": "bard", "content": "a"}, {"role": "user", "content": "b?"}]}]))
        assert code == 2 and "line 3: role 'bard'" in refusal(printed) and server.asked() == []


def test_memory_does_not_grow_with_the_input(target, tmp_path):
    """20,000 and 100,000 prompts, all but a few answered before: they are copied, and looked up at resume."""
    peaks = {}
    with Server(well) as server:
        for count in (20_000, 100_000):
            source, out = written(tmp_path / f"{count}.jsonl", asking(count)), tmp_path / str(count)
            argv = ["--prompts", source, "--model", target, "--out", out, "--api", server.url, "--api-model", "named"]
            kilobytes = []
            for script in (401, well):
                server.script = (lambda n, b: 401) if script == 401 else well
                code, peak = peak_of(argv)
                assert code == (2 if script == 401 else 0)
                kilobytes.append(peak)
                row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 200}], "finish_reason": "stop", "usage": {}}
                if script == 401:
                    written(out / "rows.jsonl", [{"id": f"p{k}", **row} for k in range(count - 20)])
            peaks[count] = max(kilobytes)
    assert peaks[100_000] < 1.2 * peaks[20_000], peaks           # ids in a set would be 130 bytes each: 1.3


def peak_of(argv):
    """(exit code, peak resident kilobytes) of a run."""
    code = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=2).returncode; print(r, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code, sys.executable, SCRIPTS / "01_generate.py", *argv], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "API_KEY": KEY, "CONCURRENCY": "8"})
    return map(int, done.stdout.split())


# --- several servers, kills, the key ----------------------------------------------------------------------------------

def test_several_servers_share_the_work_and_one_that_goes_away_is_made_up_for(flags, tmp_path):
    slow = lambda n, b: Reply(well(n, b), delay=0.02)  # noqa: E731
    with Server(slow) as one, Server(lambda n, b: slow(n, b) if n <= 20 else Reply(close=True)) as two:
        code, printed = run("01_generate.py", *flags((one, two), asking(100)))
        assert code == 0, printed
        assert len(two.asked()) >= 20 and len(one.asked()) >= 75
    assert len(read(tmp_path / "01")) == 100


def test_kills_at_random_lose_nothing_double_nothing_and_are_accounted_for(target, tmp_path):
    """Every id once; no request for a stored id; totals of an undisturbed run; what was sent twice was in flight at a kill."""
    count, kills, level = int(os.environ.get("ROWS", 2000)), int(os.environ.get("KILLS", 4)), 8
    source, chance = written(tmp_path / "prompts.jsonl", asking(count)), random.Random(time.time_ns())

    def script(n, body):
        number = int(question(body).split()[1].rstrip("?"))
        return Reply(answer(f"answer {number}", usage={"prompt_tokens": 5, "completion_tokens": number % 97 + 1, "cost": number / 1e6}),
                     delay=random.uniform(0, 0.01))

    with Server(script) as server:
        out = tmp_path / "01"
        argv = ["--prompts", source, "--model", target, "--out", out, "--api", server.url, "--api-model", "named"]
        again, at_most = 0, 0
        for kill in range(kills):
            before = server.replied
            process = start("01_generate.py", *argv, CONCURRENCY=str(level))
            room = max(1, (count - before) // (kills - kill + 1))
            server.wait_for(lambda: server.replied >= before + chance.randint(1, room), 120)
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
            assert process.process.exitcode == -9
            server.wait_for(lambda: server.now == 0)
            stored = {json.loads(line)["id"] for line in (out / "rows.jsonl").read_bytes().split(b"\n")[:-1]} if (out / "rows.jsonl").exists() else set()
            sent = set(server.asked())
            again += len(sent) - len(stored)
            server.stored_at = getattr(server, "stored_at", []) + [(len(server.asked()), {f"question {i[1:]}?" for i in stored})]
            at_most += level
        code, printed = run("01_generate.py", *argv, CONCURRENCY=str(level)) if count < 5000 else finished(argv, level)
        assert code == 0, printed
        asked = server.asked()
    rows, done = read(out), stage.done(out)
    assert sorted(r["id"] for r in rows) == sorted(f"p{k}" for k in range(count))
    for position, stored in server.stored_at:
        assert not stored & set(asked[position:])
    twice = len(asked) - count
    assert twice <= done["unaccounted"] <= at_most                # some were noted and killed before they were sent
    assert done["cost"] == pytest.approx(sum(k / 1e6 for k in range(count))) == pytest.approx(sum(r["cost"] for r in rows))
    assert (done["prompt_tokens"], done["completion_tokens"]) == (5 * count, sum(k % 97 + 1 for k in range(count)))


def finished(argv, level):
    process = start("01_generate.py", *argv, CONCURRENCY=str(level))
    return process.wait(900), process.log


def test_a_server_that_echoes_the_key_does_not_make_it_known(flags, tmp_path):
    def script(n, body):
        return Reply({"error": {"code": 400, "message": f"bad request with key {KEY}"}}, 400) if question(body) == "question 0?" else well(n, body)

    _, rows, reasons, printed = answered(flags, script, asking(3))                # `run` looks for it in all files and prints
    detail = read(tmp_path / "01", "rejected")[0]["detail"]
    assert reasons == {"p0": "http 400"} and "bad request with key" in detail and KEY not in detail + printed


@pytest.mark.parametrize("code", [401, 402, 403, 429, 500])
def test_the_key_is_in_no_message_of_a_refusal(flags, code):
    with Server(lambda n, b: Reply({"error": {"message": f"no: {KEY}"}}, code, {"WWW-Authenticate": KEY})) as server:
        process = start("01_generate.py", *flags(server, asking(1)), CONCURRENCY="1")
        if code in (429, 500):
            server.wait_for(lambda: server.replied >= 2)
            process.signal(15)
        assert process.wait() in (2, 143)
