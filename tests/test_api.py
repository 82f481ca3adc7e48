"""Answering through an API that misbehaves: the client, its concurrency, and 01_generate as a process."""
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import api
import stage
import tiny
from misbehaving import (KEY, SCRIPTS, Reply, Server, answer, error_in_200, holding_the_key, question, refusal, run, start)

LOOP = "and so on and on " * 20


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path):
    """Twenty prompts: ids p0 .. p19, texts "question 0?" .."""
    return written(tmp_path / "prompts.jsonl", [{"id": f"p{k}", "prompt": f"question {k}?"} for k in range(20)])


@pytest.fixture
def generate(tiny_target, tmp_path):
    """generate(server, prompts): 01_generate's flags against a server."""
    def flags(server, prompts):
        return ["--prompts", prompts, "--model", tiny_target, "--out", tmp_path / "01", "--api", server.url, "--api-model", "named"]
    return flags


def written(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def read(out, name="rows"):
    path = out / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def names(out, name="rows"):
    return [r["id"] for r in read(out, name)]


ALL = {f"p{k}" for k in range(20)}


def well(n, body):
    return answer(f"the answer to {question(body)}")


# --- each -------------------------------------------------------------------------------------------------------------

def test_results_come_as_they_are_completed_and_not_in_order():
    released = threading.Event()

    def work(item):
        if item == 0:
            released.wait(5)
        return item

    results = api.each(work, range(4), 2)
    first = [next(results) for _ in range(3)]
    released.set()
    assert first == [1, 2, 3] and list(results) == [0]


def test_never_more_than_the_limit_and_as_many_as_the_limit_are_in_flight():
    lock, now, most, drawn = threading.Lock(), [0], [0], [0]

    def items():
        for k in range(40):
            drawn[0] += 1
            yield k

    def work(item):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= 1
        return item

    ahead = 0
    for finished, _ in enumerate(api.each(work, items(), 5)):
        ahead = max(ahead, drawn[0] - finished)
    assert most[0] == 5 and ahead <= 6                            # nor are items drawn long before their turn


def test_an_exception_of_one_item_is_raised_at_once():
    released = threading.Event()

    def work(item):
        if item == 1:
            raise ZeroDivisionError
        released.wait(20)

    began = time.time()
    with pytest.raises(ZeroDivisionError):
        list(api.each(work, range(10), 3))
    assert time.time() - began < 2
    released.set()


def test_no_items_give_no_results():
    assert list(api.each(str, [], 4)) == []


def test_post_tries_again_by_itself_and_tells_one_requests_fault_from_the_servers():
    with Server(lambda n, body: {1: 503, 2: well(n, body), 3: 400, 4: 401}[n]) as server:
        client = api.Api(server.url)
        ask = {"messages": [{"role": "user", "content": "a?"}]}
        assert client.post("/chat/completions", ask)["choices"][0]["message"]["content"] == "the answer to a?"
        with pytest.raises(api.Rejected, match="http 400: this is error 400"):
            client.post("/chat/completions", ask)
        with pytest.raises(stage.Refused, match="answered 401"):
            client.post("/chat/completions", ask)


def test_what_ended_the_work_is_raised_also_when_it_was_the_last_item():
    def work(item):
        if item == 2:
            raise stage.Refused("the third")
        return item

    found = []
    with pytest.raises(stage.Refused, match="the third"):
        for item in api.each(work, range(3), 1):
            found.append(item)
    assert found == [0, 1]


@pytest.mark.parametrize("url", ["https://user:secret@host:8000/v1", "https://secret@host:8000/v1", "https://host:8000/v1?key=secret"])
def test_a_url_is_shown_without_its_credentials(url):
    assert api.strip_credentials(url) == "https://host:8000/v1"


# --- runs that end ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def closing(tiny_target, tmp_path_factory):
    """A run whose server closes its port after five replies.  The client gives up after some 25 s: started first, its end
    is looked at last."""
    path = tmp_path_factory.mktemp("closing")
    asked = written(path / "prompts.jsonl", [{"id": f"p{k}", "prompt": f"question {k}?"} for k in range(20)])
    server = Server(lambda n, body: well(n, body) if n <= 5 else Reply(close=True))
    server.__enter__()
    flags = ["--prompts", asked, "--model", tiny_target, "--out", path / "01", "--api", server.url, "--api-model", "named"]
    process = start("01_generate.py", *flags, CONCURRENCY="1")
    yield server, process, flags
    if process.process.exitcode is None:
        process.kill()


def test_a_clean_run_stores_every_answer_and_shows_the_key_to_no_one_but_the_server(closing, generate, prompts, tmp_path):
    out = tmp_path / "01"
    with Server(lambda n, body: Reply(well(n, body), delay=0.02)) as server:
        command = [sys.executable, str(SCRIPTS / "01_generate.py"), *map(str, generate(server, prompts))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, "API_KEY": KEY, "CONCURRENCY": "4"})
        seen = b""
        while process.poll() is None:
            seen += Path(f"/proc/{process.pid}/cmdline").read_bytes()
            time.sleep(0.05)
        printed = process.communicate()[0]
        assert process.returncode == 0, printed
        assert KEY.encode() not in seen and b"01_generate" in seen
        holding_the_key(tmp_path, printed)
        assert {headers["Authorization"] for *_, headers in server.requests} == {f"Bearer {KEY}"}
        assert server.most == 4 and sorted(server.asked()) == sorted(f"question {k}?" for k in range(20))
        body = server.requests[0][2]
    assert body == {"model": "named", "messages": [{"role": "user", "content": body["messages"][0]["content"]}],
                    "temperature": 0.7, "top_p": 1.0, "max_tokens": 2048}
    rows = read(out)
    assert {r["id"] for r in rows} == ALL and len(rows) == 20 and read(out, "rejected") == []
    for r in rows:
        asked = f"question {r['id'][1:]}?"
        assert r["messages"] == [{"role": "user", "content": asked}, {"role": "assistant", "content": f"the answer to {asked}"}]
        assert (r["finish_reason"], r["model"], r["temperature"], r["usage"]) == ("stop", "named-0428", 0.7, {"completion_tokens": 4})
    done = stage.done(out)
    assert (done["rows_in"], done["rows_out"], done["dropped"]) == (20, 20, {})


def misbehave(n, body):
    """One fault for each of some questions; those that are retried behave from the second time on."""
    number = int(question(body).split()[1].rstrip("?"))
    again = misbehave.asked.setdefault(number, 0)
    misbehave.asked[number] += 1
    first = {1: error_in_200(502), 2: error_in_200(429), 3: Reply({"error": "busy"}, 429, {"Retry-After": "2"}), 4: 503}
    if number in first and not again:
        return first[number]
    return {5: error_in_200(400), 6: {"choices": []}, 7: {"choices": None}, 8: answer(""), 9: answer(None), 10: answer(" \n"),
            11: answer(LOOP), 12: answer("cut in the", "length"), 13: 400, 14: 404,
            15: answer("", "length", reasoning_content="long thoughts"), 16: answer("a\u2028b\x85c\x0bd"),
            }.get(number) or well(n, body)


@pytest.fixture(scope="module")
def faulty(tiny_target, tmp_path_factory, closing):
    """A finished run of 20 prompts through `misbehave`: (stage directory, its server)."""
    path = tmp_path_factory.mktemp("faulty")
    asked = written(path / "prompts.jsonl", [{"id": f"p{k}", "prompt": f"question {k}?"} for k in range(20)])
    misbehave.asked = {}
    with Server(misbehave) as server:
        code, printed = run("01_generate.py", "--prompts", asked, "--model", tiny_target, "--out", path / "01", "--api", server.url,
                            "--api-model", "named", CONCURRENCY="20")
    assert code == 0, printed
    return path / "01", server


def attempts(server, number):
    return [at for at, _, body, _ in server.requests if question(body) == f"question {number}?"]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_errors_that_pass_are_tried_again_and_answered(faulty, number):
    out, server = faulty
    assert f"p{number}" in names(out) and len(attempts(server, number)) == 2


def test_the_wait_that_a_429_asks_for_is_kept(faulty):
    first, second = attempts(faulty[1], 3)
    assert second - first >= 2


@pytest.mark.parametrize("number, reason", [(5, "http 400"), (6, "no choices"), (7, "no choices"), (8, "empty answer"),
                                            (9, "empty answer"), (10, "empty answer"), (11, "answer loops"), (13, "http 400"),
                                            (14, "http 404"), (15, "only reasoning")])
def test_what_is_no_answer_is_rejected_with_its_reason_and_asked_once(faulty, number, reason):
    out, server = faulty
    assert {r["id"]: r["reason"] for r in read(out, "rejected")}.get(f"p{number}") == reason
    assert f"p{number}" not in names(out) and len(attempts(server, number)) == 1


def test_every_prompt_is_counted_once(faulty):
    out, _ = faulty
    assert sorted(names(out) + names(out, "rejected")) == sorted(ALL)
    done = stage.done(out)
    assert (done["rows_in"], done["rows_out"]) == (20, 10)
    assert done["dropped"] == {"answer loops": 1, "empty answer": 3, "http 400": 2, "http 404": 1, "no choices": 2, "only reasoning": 1}


def test_a_cut_answer_is_stored_as_cut(faulty):
    found = {r["id"]: r for r in read(faulty[0])}
    assert found["p12"]["finish_reason"] == "length" and found["p0"]["finish_reason"] == "stop"


def test_characters_that_end_lines_elsewhere_stay_in_one_row(faulty):
    found = {r["id"]: r for r in read(faulty[0])}
    assert found["p16"]["messages"][-1]["content"] == "a\u2028b\x85c\x0bd"


ODD = {
    "html": Reply(b"<html>a proxy's page</html>", headers={"Content-Type": "text/html"}),
    "a list": Reply([1, 2]),
    "no message": {"choices": [{"index": 0}]},
    "null message": {"choices": [{"message": None, "finish_reason": "stop"}]},
    "null choice": {"choices": [None]},
    "content in parts": answer([{"type": "text", "text": "yes"}]),
    "half an emoji": Reply(json.dumps(answer("cut \ud83d")).encode()),
    "null usage count": answer() | {"usage": {"completion_tokens": None}},
    "error code as text": error_in_200("429"),
    "error without a code": error_in_200(None),
}


@pytest.mark.parametrize("name", list(ODD))
def test_one_odd_reply_does_not_end_the_stage(generate, tmp_path, name):
    """It is tried again or rejected, and the others are answered."""
    two = written(tmp_path / "two.jsonl", [{"id": f"p{k}", "prompt": f"question {k}?"} for k in range(2)])
    with Server(lambda n, body: ODD[name] if n == 1 else well(n, body)) as server:
        code, printed = run("01_generate.py", *generate(server, two), CONCURRENCY="1")
    assert code == 0 and "Traceback" not in printed, printed
    assert sorted(names(tmp_path / "01") + names(tmp_path / "01", "rejected")) == ["p0", "p1"]


@pytest.mark.parametrize("code", ["429", None])
def test_an_error_in_a_200_that_may_pass_is_tried_again_however_its_code_is_written(generate, tmp_path, code):
    one = written(tmp_path / "one.jsonl", [{"id": "p0", "prompt": "question 0?"}])
    with Server(lambda n, body: error_in_200(code) if n == 1 else well(n, body)) as server:
        assert run("01_generate.py", *generate(server, one))[0] == 0
    assert names(tmp_path / "01") == ["p0"]


@pytest.mark.parametrize("finish", ["error", "content_filter"])
def test_an_answer_that_the_provider_broke_off_is_no_row(generate, tmp_path, finish):
    one = written(tmp_path / "one.jsonl", [{"id": "p0", "prompt": "question 0?"}, {"id": "p1", "prompt": "question 1?"}])
    with Server(lambda n, body: answer("half an ans", finish) if question(body) == "question 0?" else well(n, body)) as server:
        assert run("01_generate.py", *generate(server, one))[0] == 0
    assert names(tmp_path / "01") == ["p1"] and names(tmp_path / "01", "rejected") == ["p0"]


# --- runs that are ended ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_any_moment_loses_and_doubles_nothing(generate, prompts, tmp_path, seed):
    out, chance = tmp_path / "01", random.Random(time.time_ns() + seed)
    killed = threading.Event()

    def script(n, body):
        if n >= 18:
            killed.wait(30)                                       # a slow machine must not finish before it is killed
        return Reply(well(n, body), delay=chance.uniform(0, 0.05))

    with Server(script) as server:
        process = start("01_generate.py", *generate(server, prompts), CONCURRENCY="3")
        replies = chance.randint(1, 17)                           # then a moment more, mid-write included
        server.wait_for(lambda: server.replied >= replies)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        killed.set()
        time.sleep(0.1)                                           # what it had sent is counted
        server.wait_for(lambda: server.now == 0)
        assert process.process.exitcode == -9 and not (out / "done.json").exists()
        stored = {json.loads(line)["id"] for line in (out / "rows.jsonl").read_bytes().split(b"\n")[:-1]}
        before = len(server.asked())
        assert len(stored) < 20
        code, printed = run("01_generate.py", *generate(server, prompts))
        assert code == 0, printed
        again = server.asked()[before:]
    assert sorted(again) == sorted(f"question {name[1:]}?" for name in ALL - stored)
    assert len(read(out)) == 20 and set(names(out)) == ALL and stage.done(out)["rows_out"] == 20


@pytest.mark.parametrize("tail", [b'{"id": "p7", "messages": [{"role"', '{"id": "p7", "messages": "\u00e9'.encode()[:-1]],
                         ids=["cut", "cut in a character"])
def test_a_torn_last_line_is_removed_and_its_prompt_asked_again(generate, prompts, tmp_path, tail):
    out = tmp_path / "01"
    with Server(lambda n, body: 401 if n == 6 else well(n, body)) as server:
        assert run("01_generate.py", *generate(server, prompts), CONCURRENCY="1")[0] == 2
        before = (out / "rows.jsonl").read_bytes()
        with open(out / "rows.jsonl", "ab") as file:
            file.write(tail)
        code, printed = run("01_generate.py", *generate(server, prompts))
        assert code == 0, printed
        assert server.asked().count("question 7?") == 1
    assert (out / "rows.jsonl").read_bytes().startswith(before) and len(read(out)) == 20 and set(names(out)) == ALL


def test_a_wrong_key_ends_the_stage_at_once_and_leaves_every_prompt_pending(generate, prompts, tmp_path):
    out, key_is_right = tmp_path / "01", []
    with Server(lambda n, body: well(n, body) if key_is_right else 401) as server:
        began = time.time()
        code, printed = run("01_generate.py", *generate(server, prompts))
        assert code == 2 and "401" in refusal(printed) and "key" in refusal(printed)
        assert time.time() - began < 15 and len(server.asked()) <= 8           # one for each request in flight
        assert read(out) == read(out, "rejected") == [] and not (out / "done.json").exists()
        key_is_right.append(True)
        assert run("01_generate.py", *generate(server, prompts))[0] == 0
    assert set(names(out)) == ALL


def test_an_empty_balance_ends_the_stage_and_the_rest_is_asked_later(generate, prompts, tmp_path):
    out, paid = tmp_path / "01", []
    with Server(lambda n, body: 402 if n >= 6 and not paid else well(n, body)) as server:
        code, printed = run("01_generate.py", *generate(server, prompts), CONCURRENCY="1")
        assert code == 2 and "402" in refusal(printed) and "balance" in refusal(printed)
        stored = names(out)
        assert len(stored) == 5 and len(server.asked()) == 6 and read(out, "rejected") == []
        paid.append(True)
        assert run("01_generate.py", *generate(server, prompts))[0] == 0
        assert len(server.asked()) == 6 + 15
    assert names(out)[:5] == stored and sorted(names(out)) == sorted(ALL)


def test_term_stores_what_is_in_flight_and_starts_nothing_new(generate, prompts, tmp_path):
    out = tmp_path / "01"
    with Server(lambda n, body: Reply(well(n, body), delay=0.7)) as server:
        process = start("01_generate.py", *generate(server, prompts), CONCURRENCY="4")
        server.wait_for(lambda: server.now == 4)
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
        asked = server.asked()
        assert len(asked) == 4 and "the same command goes on" in process.log
        assert sorted(names(out)) == sorted(f"p{q.split()[1].rstrip('?')}" for q in asked)
        server.script = well
        assert run("01_generate.py", *generate(server, prompts))[0] == 0
        assert len(server.asked()) == 20
    assert sorted(names(out)) == sorted(ALL)


def test_term_is_obeyed_while_the_client_waits_for_a_retry(generate, prompts):
    with Server(lambda n, body: Reply({"error": "busy"}, 429, {"Retry-After": "30"})) as server:
        process = start("01_generate.py", *generate(server, prompts))
        server.wait_for(lambda: server.replied >= 8)
        process.signal(signal.SIGTERM)
        assert process.wait(4) == 143


def test_a_retry_that_term_ends_does_not_lose_the_answers_in_flight(generate, tmp_path):
    two = written(tmp_path / "two.jsonl", [{"id": f"p{k}", "prompt": f"question {k}?"} for k in range(2)])

    def script(n, body):
        busy = question(body) == "question 0?"
        return Reply({"error": "busy"}, 429, {"Retry-After": "1"}) if busy else Reply(well(n, body), delay=2.5)

    with Server(script) as server:
        process = start("01_generate.py", *generate(server, two), CONCURRENCY="2")
        server.wait_for(lambda: server.replied == 1 and server.now == 1)
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
    assert names(tmp_path / "01") == ["p1"]


# --- prompts ----------------------------------------------------------------------------------------------------------

def test_ids_that_stand_twice_are_refused_with_both_lines(generate, tmp_path):
    twice = written(tmp_path / "twice.jsonl", [{"id": "a", "prompt": "one?"}, {"id": "b", "prompt": "two?"}, {"id": "a", "prompt": "three?"}])
    with Server(well) as server:
        code, printed = run("01_generate.py", *generate(server, twice))
        assert code == 2 and f"{twice} line 3: id a stands in line 1 too" in refusal(printed)
        assert server.asked() == []


def test_prompts_without_ids_get_ids_of_their_text_whatever_their_order(generate, tmp_path, tiny_target):
    texts = ["one?", "two?", "three?"]
    found = []
    with Server(well) as server:
        for k, order in enumerate([texts, ["zero?", *texts[::-1]]]):
            source = written(tmp_path / f"{k}.jsonl", [{"prompt": t} for t in order])
            code, printed = run("01_generate.py", "--prompts", source, "--model", tiny_target, "--out", tmp_path / f"out{k}",
                                "--api", server.url, "--api-model", "named")
            assert code == 0, printed
            found.append({r["messages"][0]["content"]: r["id"] for r in read(tmp_path / f"out{k}")})
    assert len(set(found[0].values())) == 3 and found[0].items() <= found[1].items()


def test_a_prompt_without_id_that_stands_twice_is_asked_once_and_counted(generate, tmp_path):
    doubled = written(tmp_path / "doubled.jsonl", [{"prompt": "one?"}, {"prompt": "one?"}, {"prompt": "two?"}])
    with Server(well) as server:
        assert run("01_generate.py", *generate(server, doubled))[0] == 0
        assert sorted(server.asked()) == ["one?", "two?"]
    done = stage.done(tmp_path / "01")
    assert (done["rows_in"], done["rows_out"], done["dropped"]) == (3, 2, {"duplicate prompt": 1})


def test_tools_reasoning_and_tool_calls_reach_the_rows(generate, tmp_path):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [call]}
    prompt = {"id": "a", "messages": [{"role": "user", "content": "one?"}], "tools": tools, "chat_template_kwargs": {"enable_thinking": True},
              "source": "web"}
    with Server(lambda n, body: answer(None, "tool_calls", reasoning_content="I must look.", tool_calls=[call])) as server:
        code, printed = run("01_generate.py", *generate(server, written(tmp_path / "tools.jsonl", [prompt])))
        assert code == 0, printed
        body = server.requests[-1][2]
    assert (body["tools"], body["chat_template_kwargs"], body.get("source")) == (tools, {"enable_thinking": True}, None)
    row, = read(tmp_path / "01")
    assert row["messages"][-1] == {**said, "content": ""} and row["finish_reason"] == "tool_calls"
    assert {k: row[k] for k in ("tools", "chat_template_kwargs", "source")} == {k: prompt[k] for k in ("tools", "chat_template_kwargs", "source")}


def test_a_conversation_in_the_style_of_sharegpt_is_asked(generate, tmp_path):
    talk = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "one?"}, {"from": "gpt", "value": "old"}]
    with Server(well) as server:
        assert run("01_generate.py", *generate(server, written(tmp_path / "talk.jsonl", [{"id": "t", "conversations": talk}])))[0] == 0
    assert read(tmp_path / "01")[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"},
                                                    {"role": "assistant", "content": "the answer to one?"}]


def test_an_answer_at_the_end_of_a_prompt_is_made_anew(generate, tmp_path):
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "old too"}]
    with Server(well) as server:
        assert run("01_generate.py", *generate(server, written(tmp_path / "talk.jsonl", [{"id": "t", "messages": talk}])))[0] == 0
    assert read(tmp_path / "01")[0]["messages"] == [
        talk[0], {"role": "assistant", "content": "the answer to one?", "finish_reason": "stop"},
        talk[2], {"role": "assistant", "content": "the answer to two?"}]


def test_number_ids_are_kept_and_zero_is_one(generate, tmp_path):
    numbers = written(tmp_path / "numbers.jsonl", [{"id": k, "prompt": f"question {k}?"} for k in range(3)])
    with Server(well) as server:
        assert run("01_generate.py", *generate(server, numbers))[0] == 0
    assert sorted(names(tmp_path / "01")) == ["0", "1", "2"]


NOTHING = {"no keys": {}, "empty list": {"messages": []}, "only an answer": {"messages": [{"role": "assistant", "content": "A"}]},
           "null": {"prompt": None}, "number": {"prompt": 7}, "empty": {"prompt": ""}, "blank": {"prompt": " \n"},
           "text as messages": {"messages": "what?"}, "texts as messages": {"messages": ["what?"]}, "no JSON": "{what",
           "a list": "[1]"}


@pytest.mark.parametrize("name", list(NOTHING))
def test_a_line_that_asks_nothing_is_refused_with_its_number(generate, tmp_path, name):
    lines = written(tmp_path / "lines.jsonl", [{"prompt": "what?"}, NOTHING[name]])
    with Server(well) as server:
        code, printed = run("01_generate.py", *generate(server, lines))
        assert code == 2, printed
        assert f"{lines} line 2" in refusal(printed) and server.asked() == []


def test_a_file_without_prompts_is_refused(generate, tmp_path):
    with Server(well) as server:
        code, printed = run("01_generate.py", *generate(server, written(tmp_path / "none.jsonl", [])))
    assert code == 2 and "holds no prompt" in refusal(printed)


# --- self:N -----------------------------------------------------------------------------------------------------------

def test_questions_are_not_invented_by_an_api_without_raw_completions(generate, tmp_path):
    with Server(well) as server:
        code, printed = run("01_generate.py", *generate(server, "self:5"))
        assert code == 2 and "raw completions" in refusal(printed) and "--prompts FILE" in refusal(printed)
        assert server.asked() == []


def test_invented_questions_are_kept_once_and_only_if_usable(generate, tmp_path):
    texts = ["What is a tree made of?", "What is a tree made of ?", "", "Hm", LOOP, "\ufffd\ufffd is what this?"]

    def invented(n, body):
        if body["prompt"][0] != 1 or body["stop_token_ids"] != [2] or body["temperature"] != 1.0:
            return 400                                            # not the opening of a user's turn
        if n == 7:
            return {"choices": [{"text": "And what is cut off is", "finish_reason": "length"}]}
        return {"choices": [{"text": texts[n - 1] if n <= 6 else f"Why is {n} a number?", "finish_reason": "stop"}]}

    with Server(well, completions=invented) as server:
        code, printed = run("01_generate.py", *generate(server, "self:6"), CONCURRENCY="1")
    assert code == 0, printed
    out = tmp_path / "01"
    asked = [r["messages"][0]["content"] for r in read(out, "prompts")]
    assert asked[0] == texts[0] and len(asked) == 6 and all(t.startswith("Why is") for t in asked[1:])
    reasons = sorted(r["reason"] for r in read(out, "rejected"))
    assert reasons == ["question cut", "question duplicate", "question empty", "question is junk", "question is junk", "question loops"]
    done = stage.done(out)
    assert (done["rows_in"], done["rows_out"]) == (12, 6)


# --- credentials ------------------------------------------------------------------------------------------------------

def test_credentials_in_the_url_are_stored_and_printed_nowhere(generate, prompts, tmp_path):
    with Server(well) as server:
        server.url = server.url.replace("http://", "http://someone:pass-canary-77@")
        code, printed = run("01_generate.py", *generate(server, prompts))
        assert code == 2 and "--api holds more than an address" in printed
    assert "pass-canary-77" not in printed
    assert [p.name for p in (tmp_path / "01").rglob("*") if p.is_file() and b"pass-canary-77" in p.read_bytes()] == []


def test_a_netrc_file_does_not_replace_the_key(generate, tmp_path):
    one = written(tmp_path / "one.jsonl", [{"id": "p0", "prompt": "question 0?"}])
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password else\n")
    with Server(well) as server:
        code, printed = run("01_generate.py", *generate(server, one), NETRC=str(tmp_path / "netrc"))
        assert code == 0, printed
        assert {headers.get("Authorization") for *_, headers in server.requests} == {f"Bearer {KEY}"}


# --- last, since it takes longest -------------------------------------------------------------------------------------

def test_a_server_that_goes_away_ends_the_stage_which_then_goes_on(closing):
    gone, process, flags = closing
    assert process.wait(60) == 2
    assert "6 times in a row" in refusal(process.log + process.errors)
    stored = names(process.out)
    assert len(stored) == 5 and read(process.out, "rejected") == [] and not (process.out / "done.json").exists()
    with Server(well, port=gone.http.server_port) as back:        # the same server, back again
        code, printed = run("01_generate.py", *flags)
        assert code == 0, printed
        assert len(back.asked()) == 15
    assert names(process.out)[:5] == stored and sorted(names(process.out)) == sorted(ALL)


@pytest.mark.parametrize("default", [0, 64])  # 0: the level is found
def test_no_request_in_flight_is_refused_wherever_it_is_asked(monkeypatch, default):
    monkeypatch.setenv("CONCURRENCY", "0")
    with pytest.raises(stage.Refused, match="CONCURRENCY=0: wanted a number, 1 or more"):
        api.in_flight(default)
    monkeypatch.delenv("CONCURRENCY")
    assert api.in_flight(default) == default
