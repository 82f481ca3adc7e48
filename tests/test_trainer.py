"""The trainer's own arithmetic on a tiny target, in this process: what is trained, what is counted, what is left out."""
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import packing
import states
import tiny
import trainer
import vocab
import walk
from stage import Refused

torch.set_num_threads(1)
LAYERS, K, V, H = [2, 4, 5], 100, 320, 64
FLAGS = dict(optimizer="adamw", lr=1e-3, weight_decay=0.01, schedule="linear", warmup_ratio=0.0, clip_norm=1.0, ttt_steps=3,
             ttt_decay=1.0, loss="kl_div", max_broken=0.5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stored(target, tmp_path_factory):
    """02's and 03's directories of 10 rows: 8 to train, 2 held out, of 20 to 60 tokens, the last 20 of each the answer."""
    from datasets import Dataset

    path, draw = tmp_path_factory.mktemp("stored"), torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 259, (20 + 4 * k,), generator=draw).tolist() for k in range(10)]
    data = Dataset.from_list([{"input_ids": row, "loss_mask": [0] * (len(row) - 15) + [1] * 15, "seq_len": len(row), "id": f"r{k}",
                               "split": "val" if k in (3, 6) else "train"} for k, row in enumerate(ids)])
    data.set_format("torch")
    data.save_to_disk(path / "02" / "dataset")
    (path / "03").mkdir()
    reference = states.reference(target, torch.float32)
    for k, row in enumerate(ids):
        save_file({"hidden_states": reference(row, LAYERS).to(torch.bfloat16), "token_ids": torch.tensor(row)},
                  states.file_of(path / "03", k))
    return path


def mapping():
    return vocab.mapping({t: 1 + t % 7 for t in range(0, V, 2)}, K, V, always=[2])


def data(stored, pack_tokens=64, batch_tokens=128, epochs=2, **more):
    return packing.Data(stored / "02", stored / "03", H, batch_tokens, epochs, 0, trainer.Ranks(), pack_tokens, **more)


def draft(target, **more):
    return trainer.build_draft(target, LAYERS, *mapping(), 3, **more)


def run_of(target, stored, tmp_path, made=None, **flags):
    """A Trainer over the stored rows that has not begun."""
    return trainer.Trainer(draft(target), made or data(stored), SimpleNamespace(**FLAGS | flags), tmp_path, trainer.Ranks())


def batch_of(made, *rows):
    """The batch of one pack."""
    batch = made.collate([made.checked[row] for row in rows])
    return {k: v for k, v in batch.items() if torch.is_tensor(v)}


def logits_of(model, batch, **more):
    """Logits [T, K] of each TTT step, with their gradients kept, and the loss times trained tokens' tensor."""
    seen = []

    def keep(module, inputs, logits):
        seen.append(logits)
        if logits.requires_grad:
            logits.retain_grad()

    hook = model.lm_head.register_forward_hook(keep)
    found = model(**batch, ttt_steps=3, loss_config=trainer_loss(), **more)
    hook.remove()
    return seen, found[1]


def trainer_loss():
    from speculators.losses import resolve_loss_config
    return resolve_loss_config("kl_div", "eager")


# --- what is trained --------------------------------------------------------------------------------------------------

def test_the_loss_reaches_exactly_the_positions_whose_next_proposals_are_answer_tokens(target, stored):
    """Position j has read up to j and holds token j + 1; step k proposes token j + 2 + k and is trained where the target's
    distribution after token j + 1 + k is an answer's (mask of token j + 1 + k)."""
    made = data(stored)
    model, batch = draft(target), batch_of(made, 0)
    seen, loss = logits_of(model, batch)
    loss.backward()
    mask = made.table[0]["loss_mask"]
    for k, logits in enumerate(seen):
        reached = logits.grad[0].abs().sum(-1) > 0
        wanted = [j + 1 + k < len(mask) and mask[j + 1 + k] == 1 for j in range(len(reached))]
        assert reached.tolist() == wanted, k


def test_a_pack_with_nothing_to_learn_has_no_loss_and_no_gradient(target, stored, tmp_path):
    run = run_of(target, stored, tmp_path)
    sums = run.no_sums()
    _, loss = run.forward(batch_of(run.data), sums)
    loss.backward()
    assert loss.item() == 0 and sums[1] == 0 and sums.isfinite().all()
    assert all(p.grad is not None and not p.grad.any() for p in run.trainable.values())


def test_padding_changes_no_number(target, stored, tmp_path):
    found = []
    for size in (64, 164):
        run = run_of(target, stored, tmp_path, data(stored, pack_tokens=size, batch_tokens=size))
        sums = run.no_sums()
        run.forward(batch_of(run.data, 2, 1), sums)
        found.append(sums)
    assert torch.allclose(*found, rtol=1e-5)


def test_rows_of_one_pack_do_not_see_each_other_at_any_depth(target, stored):
    made, model = data(stored), draft(target)
    pair, other = batch_of(made, 1, 2), batch_of(made, 1, 2)
    first, both = made.lengths[1], made.lengths[1] + made.lengths[2]
    other["hidden_states"][:, :first] += 1.0
    other["input_ids"][:, :first] = 7
    with torch.no_grad():
        (one, _), (two, _) = logits_of(model, pair), logits_of(model, other)
    for k in range(3):
        assert torch.equal(one[k][0, first:both - k], two[k][0, first:both - k])
        assert not torch.equal(one[k][0, :first], two[k][0, :first])


def test_a_step_is_the_mean_over_its_trained_tokens_however_it_is_cut_into_packs(target, stored, tmp_path):
    def weights(run):
        return torch.cat([p.detach().flatten() for p in run.trainable.values()])

    for size, at_once in ((64, 1), (64, 3), (128, 1), (128, 2)):
        run = run_of(target, stored, tmp_path, data(stored, pack_tokens=size, batch_tokens=1024), clip_norm=1e9)
        run.data.run_at_once(at_once)
        run.optimizers = [torch.optim.SGD(run.trainable.values(), lr=1.0)]  # Adam's first step forgets how large a gradient is
        before, sums = weights(run), run.no_sums()
        for rows, batch, complete in run.data.batches([run.data.steps[0][1]]):
            run.forward(batch, sums)[1].backward()
        run.update(sums)
        hand = run_of(target, stored, tmp_path)
        losses = [hand.draft(**batch_of(hand.data, row), ttt_steps=3, loss_config=hand.loss)[1] * batch_of(hand.data, row)["loss_mask"].sum()
                  for row in hand.data.rows["train"]]
        (sum(losses) / sum(batch_of(hand.data, row)["loss_mask"].sum() for row in hand.data.rows["train"])).backward()
        gradient = torch.cat([p.grad.flatten() for p in hand.trainable.values()])
        assert (before - weights(run) - gradient).abs().max() < 1e-4 * gradient.abs().max(), (size, at_once)


def test_masked_positions_are_those_whose_next_token_is_outside_the_vocabulary(stored):
    inside = mapping()[1]
    masked, whole = data(stored, inside=inside).checked[0][1], data(stored).checked[0][1]
    ids, last = whole["input_ids"], len(whole["input_ids"]) - 1
    for j in range(last):
        assert masked["loss_mask"][j] == (whole["loss_mask"][j] and inside[ids[j + 1]])
    assert masked["loss_mask"][last] == whole["loss_mask"][last] == 1
    assert 0 < masked["loss_mask"].sum() < whole["loss_mask"].sum()


# --- the plan ---------------------------------------------------------------------------------------------------------

def test_every_epoch_holds_every_row_once_in_another_order(stored):
    made = data(stored, epochs=3)
    orders = [[row for epoch, step in made.steps if epoch == e for pack in step for row in pack] for e in range(3)]
    assert all(sorted(order) == made.rows["train"] for order in orders) and len({tuple(o) for o in orders}) == 3


def test_a_larger_number_of_train_rows_holds_the_smaller(stored):
    few, more = (set(data(stored, train_rows=n).rows["train"]) for n in (3, 6))
    assert len(few) == 3 and len(more) == 6 and few < more


def test_a_step_that_holds_no_pack_is_refused(stored):
    with pytest.raises(Refused, match="--batch-tokens 63 is less than a pack of 64 tokens"):
        data(stored, batch_tokens=63, pack_tokens=64)


@pytest.mark.parametrize("schedule, last", [("linear", 0.0), ("cosine", 0.0), ("constant", 1e-3)])
def test_the_schedule_counts_optimiser_steps_and_ends_at_its_minimum(target, stored, tmp_path, schedule, last):
    """Packs of a step do not count: accumulation makes no schedule shorter."""
    run = run_of(target, stored, tmp_path, schedule=schedule, warmup_ratio=0.2)
    run.train()
    assert run.step == run.total == len(run.data.steps) and len(run.data.steps[0][1]) == 2
    assert run.schedulers[0].get_last_lr()[0] == pytest.approx(last, abs=1e-12)


# --- what is left out -------------------------------------------------------------------------------------------------

def broken(stored, tmp_path, change, row=1):
    """A copy of the rows of which one file was changed."""
    import shutil
    shutil.copytree(stored, tmp_path / "copy")
    change(states.file_of(tmp_path / "copy" / "03", row))
    return tmp_path / "copy"


def rewritten(alter):
    def change(path):
        held = load_file(path)
        alter(held)
        save_file({k: v.contiguous() for k, v in held.items()}, path)
    return change


FAULTS = {
    "a missing file": (lambda path: path.unlink(), "can't be read"),
    "an empty file": (lambda path: path.write_bytes(b""), "can't be read"),
    "a file cut off": (lambda path: path.write_bytes(path.read_bytes()[:-5]), "can't be read"),
    "other tokens": (rewritten(lambda held: held["token_ids"].add_(1)), "other token ids"),
    "a state too few": (rewritten(lambda held: held.update(hidden_states=held["hidden_states"][:-1])), "holds states"),
    "a NaN": (rewritten(lambda held: held["hidden_states"][3, 1].fill_(math.nan)), "not finite"),
    "an infinity in the last state": (rewritten(lambda held: held["hidden_states"][5, 3, 2].fill_(math.inf)), "not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_that_cannot_be_used_is_left_out_and_changes_nothing_else(target, stored, tmp_path, fault):
    change, reason = FAULTS[fault]
    made = data(broken(stored, tmp_path, change))
    batches = list(made.batches([[[0, 1, 2]]]))
    (rows, batch, _), without = batches[0], batch_of(data(stored), 0, 2)
    assert rows == [0, 2] and reason in made.broken[1]
    assert batch.keys() >= without.keys() and all(torch.equal(batch[k], without[k]) for k in without)


def test_what_is_left_out_is_written_down_and_too_much_of_it_is_refused(stored, tmp_path):
    made = data(broken(stored, tmp_path, FAULTS["a NaN"][0]))
    list(made.batches([[[1]]]))
    made.quarantine(tmp_path, most=0.1)
    row, = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert row["row"] == 1 and row["id"] == "r1" and "not finite" in row["reason"]
    with pytest.raises(Refused, match=r"1 of 10 rows have broken states, more than --max-broken 0.05: hs_1.safetensors"):
        made.quarantine(tmp_path, most=0.05)


def poison(run, steps):
    """Make the gradients of these steps NaN."""
    next(iter(run.trainable.values())).register_hook(lambda grad: grad * math.nan if run.step in steps else grad)


def test_a_step_whose_gradient_is_not_finite_changes_no_weight_and_no_moment_and_is_counted(target, stored, tmp_path):
    run = run_of(target, stored, tmp_path)
    poison(run, {1})
    kept, update = [], run.update
    run.update = lambda sums: (kept.append({n: [p.clone(), *map(torch.clone, run.optimizers[0].state[p].values())]
                                            for n, p in run.trainable.items()}), update(sums))
    run.train()
    assert run.skipped == 1 and run.step == run.total
    assert run.schedulers[0].last_epoch == run.total                   # the schedule goes on
    assert all(torch.equal(a, b) for n in kept[1] for a, b in zip(kept[1][n], kept[2][n]))
    assert not torch.equal(kept[2]["fc.weight"][0], kept[3]["fc.weight"][0])
    assert all(math.isfinite(json.loads(line)["loss"]) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_three_such_steps_in_a_row_stop_the_run_and_name_the_samples(target, stored, tmp_path):
    run = run_of(target, stored, tmp_path)
    poison(run, {0, 2, 3, 4})
    with pytest.raises(Refused, match="3 steps in a row are not finite, up to step 5.*r[0-9]") as refusal:
        run.train()
    named = set(str(refusal.value).rpartition(": ")[2].split(", "))
    assert named == {f"r{row}" for _, step in run.data.steps[2:5] for pack in step for row in pack}


# --- what is said -----------------------------------------------------------------------------------------------------

def test_held_out_acceptance_is_that_of_walking_each_row_alone(target, stored, tmp_path):
    made = data(stored)
    run = run_of(target, stored, tmp_path, made)
    run.step = 1
    run.validate()
    row = json.loads((tmp_path / "validation.jsonl").read_text())
    accepted, possible = walk.Counter(), walk.Counter()
    for k in made.rows["val"]:
        sample, ids = made.samples[k], made.table[k]["input_ids"]
        proposals = [(step + run.draft.d2t[step]).tolist() for step in
                     trainer.unroll(run.draft, sample["input_ids"], sample["hidden_states"].float(), 3)]
        accepted += walk.walk(proposals, ids, len(ids) - 15)
        known = [t if run.draft.t2d[t] else -1 for t in ids]
        possible += walk.walk([known[2 + j:] for j in range(3)], ids, len(ids) - 15)
    assert row["acceptance"] == pytest.approx(walk.acceptance_length(accepted), abs=1e-4)
    assert row["ceiling"] == pytest.approx(walk.acceptance_length(possible), abs=1e-4)
    assert 1 < row["ceiling"] < 4


def test_workers_are_as_many_as_shared_memory_holds_batches_of(monkeypatch):
    free = shutil.disk_usage("/dev/shm").free
    monkeypatch.setenv("WORKERS", "4")
    assert packing.workers(1, torch.device("cpu")) == 4
    assert packing.workers(free // 12, torch.device("cpu")) == 2
    assert packing.workers(free, torch.device("cpu")) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert packing.workers(free // 12, torch.device("cpu")) == 1


# --- the target, and other drafts -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["tied", "untied, in shards", "says untied, has no head"])
def test_embedding_and_head_are_found_however_the_target_stores_them(tmp_path, kind):
    """A draft of a tied target is not tied: its head has other rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, head_dim=16,
                         tie_word_embeddings=kind != "untied, in shards", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "target", max_shard_size="100kB" if "shards" in kind else "5GB")
    if "says" in kind:
        path = tmp_path / "target/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    d2t, t2d = mapping()
    made = trainer.build_draft(tmp_path / "target", LAYERS, d2t, t2d, 3)
    head = model.get_input_embeddings().weight if kind != "untied, in shards" else model.lm_head.weight
    assert torch.equal(made.embed_tokens.weight, model.get_input_embeddings().weight)
    assert torch.equal(made.lm_head.weight, head[torch.arange(K) + d2t]) and torch.equal(made.lm_head.weight, made.verifier_lm_head.weight)
    made.save_pretrained(tmp_path / "draft")
    again = trainer.load_draft(tmp_path / "draft", tmp_path / "target")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize("where", ["nested", "top level"])
def test_the_rotary_base_is_the_targets(target, tmp_path, where):
    import shutil
    shutil.copytree(target, tmp_path / "target")
    path = tmp_path / "target/config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("rope")}
    theta = {"rope_theta": 1e6} if where == "top level" else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    path.write_text(json.dumps(config | theta))
    frequencies = draft(tmp_path / "target").rotary_emb.inv_freq
    assert torch.allclose(frequencies, 1e6 ** (-torch.arange(0, 16, 2) / 16), rtol=1e-5)


def test_equal_seeds_give_equal_drafts_and_no_two_layers_are_alike(target):
    one, two, other = (draft(target, layers=2, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert not torch.equal(one["layers.0.mlp.up_proj.weight"], one["layers.1.mlp.up_proj.weight"])


@pytest.fixture(scope="module")
def another(target, stored, tmp_path_factory):
    """An exported draft to start from: (04's directory, its weights)."""
    import export
    path = tmp_path_factory.mktemp("another")
    made = draft(target, seed=9)
    export.export(made, data(stored), target, path)
    return path, {n: p.to(torch.bfloat16).float() for n, p in trainer.trainable(made).items()}


@pytest.mark.parametrize("form", ["draft", "sglang"])
def test_a_draft_starts_from_the_weights_of_another_in_either_format(target, another, form):
    made = draft(target)
    trainer.start_from(made, another[0] / form, mapping()[0])
    assert all(torch.equal(p, another[1][name]) for name, p in trainer.trainable(made).items())


@pytest.mark.parametrize("form", ["draft", "sglang"])
@pytest.mark.parametrize("other, message", [
    (dict(layer_ids=[1, 4, 5]), r"layer ids \[2, 4, 5\], here \[1, 4, 5\]"), (dict(norms="3"), "fc_norm True, here False"),
    (dict(layers=2), "draft layers 1, here 2"), (dict(lm_head="trained"), "vocabulary")])
def test_a_draft_of_another_making_is_refused(target, another, form, other, message):
    d2t, t2d = vocab.mapping({t: 1 for t in range(1, V, 2)}, K, V, always=[2]) if message == "vocabulary" else mapping()
    made = trainer.build_draft(target, **{"layer_ids": LAYERS} | other, d2t=d2t, t2d=t2d, ttt_steps=3)
    before = {n: p.clone() for n, p in trainer.trainable(made).items()}
    with pytest.raises(Refused, match=message):
        trainer.start_from(made, another[0] / form, d2t)
    assert all(torch.equal(p, before[n]) for n, p in trainer.trainable(made).items())


def test_pickles_are_not_read(target, another, tmp_path):
    import shutil
    shutil.copytree(another[0] / "draft", tmp_path / "draft")
    torch.save(load_file(tmp_path / "draft/model.safetensors"), tmp_path / "draft/pytorch_model.bin")
    (tmp_path / "draft/model.safetensors").unlink()
    with pytest.raises(Refused, match="fc.weight is missing"):
        trainer.start_from(draft(target), tmp_path / "draft", mapping()[0])
