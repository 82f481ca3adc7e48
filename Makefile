# Eaglet: raise an EAGLE-3 draft model for a large language model.  Start with `make help`.
#
#   prompts ─▶ 01_generate ─▶ 02_prepare ─▶ 03_extract ─▶ 04_train ─▶ 05_eval
#   └──────────────── runs/TARGET/DATA ────────────────┘  └ runs/TARGET/DATA/NAME ┘
#
# Every stage is one script writing one directory.  The script writes done.json last; that file is the make target.  A
# stage is run again if an upstream done.json is newer or if its flags differ from those recorded in `args`; the script
# then resumes, confirms, or refuses.  A flag --like-this is the variable LIKE_THIS: on the command line or in
# env/TARGET.env, never from the environment.  What changes no number (GPUs, ports, workers) is environment: env/local.env.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR .SUFFIXES:
MAKEFLAGS   += --no-builtin-rules

TARGET := smollm2-135m
DATA   := base
NAME   := base
RUNS   := runs
PYTHON := .venv/bin/python
EVAL_PROMPTS = $(D)/02_prepare/heldout.jsonl models/humaneval.jsonl
SETS   := $(patsubst %,models/%.jsonl,humaneval mt-bench gsm8k math500)

-include env/local.env
include env/$(TARGET).env

READ := can be read by everyone who lists processes
$(if $(filter command line,$(origin API_KEY)),$(error API_KEY on a make command line $(READ): export it))
$(if $(findstring @,$(API))$(findstring ?,$(API)),$(error API with a user, a password or a query $(READ): export API_KEY instead))

D := $(RUNS)/$(TARGET)/$(DATA)
N := $(D)/$(NAME)
# A stage writes done.json whole, and last: make must not delete it when a signal comes before the process has ended.
.PRECIOUS: $(addsuffix /done.json,$(D)/01_generate $(D)/02_prepare $(D)/03_extract $(N)/04_train $(N)/05_eval)

# $(call flags,VARIABLES): "--like-this value" for every LIKE_THIS that the command line or an env file sets.
flags = $(foreach v,$1,$(if $(filter-out undefined environment,$(origin $v)),$(if $($v),--$(shell tr A-Z_ a-z- <<< $v) $($v))))
# $(call changed,DIR,FLAGS): ALWAYS if DIR was last made with other flags.
changed = $(if $(findstring <$(strip $2)>,$(file <$1/args)),,ALWAYS)
ALWAYS:
export GOALS := $(or $(filter $(MAKECMDGOALS),generate prepare extract train eval all),all)

##@ Pipeline
FIRST := $(if $(filter all,$(MAKECMDGOALS)),doctor)
$(FIRST): | $(filter models/smollm2-135m,$(MODEL))
GENERATE_FLAGS := API API_MODEL ANSWERED_BY TEMPERATURE ANSWER_TOKENS QUESTION_TOKENS GENERATE_DTYPE REASONING PIN_PROVIDER \
  EXTRA_BODY PRICES MAX_COST
PROMPT_FILE := $(filter-out self:% hf:%,$(PROMPTS))
GENERATE := $(addprefix --prompts ,$(filter self:% hf:%,$(PROMPTS))) $(call flags,$(GENERATE_FLAGS))
generate: $(D)/01_generate/done.json  ## 01  let the target answer the prompts
$(D)/01_generate/done.json: $(PROMPT_FILE) $(call changed,$(D)/01_generate,$(GENERATE)) | $(filter models/smollm2-135m,$(MODEL)) $(FIRST)
	$(PYTHON) scripts/01_generate.py $(addprefix --prompts ,$(PROMPT_FILE)) --model $(MODEL) --out $(@D) $(GENERATE)

PREPARE_FLAGS := MAX_SEQ_LEN LONG_ROWS TRAINED_TURNS TRAIN_REASONING MAX_DROPPED VAL_SHARE SPLIT_SEED
PREPARE := $(call flags,$(PREPARE_FLAGS))
prepare: $(D)/02_prepare/done.json  ## 02  token ids, loss mask, token counts
$(D)/02_prepare/done.json: $(D)/01_generate/done.json $(call changed,$(D)/02_prepare,$(PREPARE))
	$(PYTHON) scripts/02_prepare.py --answers $(D)/01_generate --model $(MODEL) --out $(@D) $(PREPARE)

EXTRACT_FLAGS := LAYER_IDS EXTRACT_DTYPE DTYPE
EXTRACT := $(call flags,$(EXTRACT_FLAGS))
extract: $(D)/03_extract/done.json  ## 03  dump the target's hidden states
$(D)/03_extract/done.json: $(D)/02_prepare/done.json $(call changed,$(D)/03_extract,$(EXTRACT))
	$(PYTHON) scripts/03_extract.py --tokens $(D)/02_prepare --model $(MODEL) --out $(@D) $(EXTRACT)

TRAIN_FLAGS := DRAFT_VOCAB DRAFT_COVERAGE TRAIN_ROWS EPOCHS BATCH_TOKENS PACK_TOKENS OPTIMIZER LR SCHEDULE WARMUP_RATIO WEIGHT_DECAY CLIP_NORM \
  TTT_STEPS TTT_DECAY LOSS LM_HEAD OUT_OF_VOCAB NORMS DRAFT_LAYERS MAX_BROKEN SEED
TRAIN := $(call flags,$(TRAIN_FLAGS))
train: $(N)/04_train/done.json  ## 04  train the draft model, export it
$(N)/04_train/done.json: $(D)/03_extract/done.json $(wildcard $(addsuffix /config.json,$(word 2,$(call flags,INIT)))) $(call changed,$(N)/04_train,$(TRAIN))
	$(PYTHON) scripts/04_train.py --tokens $(D)/02_prepare --states $(D)/03_extract --model $(MODEL) --out $(@D) $(call flags,INIT) $(TRAIN)

EVAL_FLAGS := EVAL_ROWS EVAL_TOKENS EVAL_CONCURRENCY EVAL_ROUNDS EVAL_DTYPE EVAL_SAMPLED SWEEP MAX_FAILED
EVAL := $(call flags,$(EVAL_FLAGS))
eval: $(N)/05_eval/done.json  ## 05  acceptance length and speed-up, served by SGLang
$(N)/05_eval/done.json: $(N)/04_train/done.json $(call changed,$(N)/05_eval,$(EVAL)) | $(filter $(SETS),$(EVAL_PROMPTS))
	$(PYTHON) scripts/05_eval.py --draft $(N)/04_train --model $(MODEL) --tokens $(D)/02_prepare --out $(@D) --eval-prompts $(EVAL_PROMPTS) $(EVAL)

MACHINE := CUDA_VISIBLE_DEVICES NPROC PORT CONCURRENCY RPM TPM DEADLINE WORKERS SAVE_EVERY SERVER_WAIT SGLANG_ARGS LOG_EVERY OMP_NUM_THREADS \
  TRUST_REMOTE_CODE REDO DEVICE PYTHON GOAL WAIT STOP_WAIT STALL_AFTER STALL_EXIT JSON WATCH ROW AGAINST PROBE FORCE \
  SERVERS WORKER STAGING KEEP_FREE FSYNC VERIFY MICRO_TOKENS SHARD NNODES NODE_RANK RDZV LOGGER
KNOWN := TARGET DATA NAME RUNS MODEL PROMPTS INIT EVAL_PROMPTS $(MACHINE) $(foreach s,GENERATE PREPARE EXTRACT TRAIN EVAL,$($s_FLAGS))
# The settings on the command line; a word within a value, like the second of "--tp-size=4 --dp-size=2", is none.
TYPED := $(foreach o,$(MAKEOVERRIDES),$(if $(findstring =,$o),$(firstword $(subst =, ,$o))))
TYPED := $(sort $(foreach v,$(TYPED),$(if $(filter command,$(origin $v)),$v)))
UNKNOWN := $(filter-out $(KNOWN),$(TYPED) $(shell sed -nE 's/^([A-Z_]+)=.*/\1/p' env/$(TARGET).env))
$(if $(UNKNOWN),$(error no such setting: $(UNKNOWN).  There are $(KNOWN)))

all: eval  ## everything, in order
demo: setup  ## the whole flow on SmolLM2-135M, from nothing; ends with a report
	@$(MAKE) --no-print-directory all TARGET=smollm2-135m API= API_MODEL=
	@cat $(RUNS)/smollm2-135m/$(DATA)/$(NAME)/05_eval/report.md

##@ Jobs
JOB := $(TARGET)-$(DATA)-$(NAME)
launch:  ## run GOAL (all) detached; WAIT seconds (30) or for the first-step, then say how it is
	@WAIT=$(WAIT) $(PYTHON) scripts/job.py launch $(JOB) --dirs $(D) $(N) -- make $(or $(GOAL),all) \
	  $(foreach v,$(filter-out WAIT GOAL,$(TYPED)),'$v=$(subst ','\'',$(value $v))')
tail:  ## follow the job's log until it ends; Ctrl-C leaves the job alone
	@$(PYTHON) scripts/job.py tail $(JOB)
stop:  ## stop the job, or what runs in its directories: it saves, then all that it started ends
	@$(PYTHON) scripts/job.py stop $(JOB) --dirs $(D) $(N)
status:  ## one line a stage of every run (JSON=1 for programs, WATCH=1 on a terminal)
	@$(PYTHON) scripts/status.py $(RUNS) $(if $(JSON),--json) $(if $(WATCH),--watch)
COMMANDS = commands=$$(make --no-print-directory -n $(or $(GOAL),all)); echo "$$commands"
plan:  ## what GOAL (all) would run: commands, tokens, dollars, disk, time (PROBE=1 measures first, on a few rows)
	@$(COMMANDS) | $(PYTHON) scripts/plan.py $(if $(PROBE),--probe)
doctor:  ## is this machine fit for GOAL (all)?  One line a check, with the mend; make all asks first (FORCE=1 goes on)
	@$(COMMANDS) | $(PYTHON) scripts/doctor.py $(if $(FIRST),--keep)
show:  ## sample ROW of 02 decoded, trained tokens marked, here and as HTML
	@$(PYTHON) scripts/show.py --tokens $(D)/02_prepare --model $(MODEL) --row $(or $(ROW),0)
report:  ## write the report of 05 anew; AGAINST="hot cold": compare with the drafts of these names
	@$(PYTHON) scripts/report.py $(N)/05_eval $(patsubst %,$(D)/%/05_eval,$(AGAINST))
verify:  ## how many of how many hidden-state files are intact, by checksum
	@$(PYTHON) scripts/verify.py --states $(D)/03_extract --tokens $(D)/02_prepare

##@ Set-up and tests
DEVICE ?= $(if $(wildcard /dev/nvidiactl),cuda,cpu)
setup: .venv/$(DEVICE)  ## make .venv for this machine (DEVICE=cpu|cuda) and patch its SGLang
.venv/cpu: $(wildcard env/requirements-cpu.txt)
	python3 -m venv .venv
	.venv/bin/pip install -q torch==2.13.0
	.venv/bin/pip install -q --no-deps -r $<
	echo 'import sys; sys.path.insert(0, "$(CURDIR)/env/cpu")' > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/eaglet_cpu.pth"
	$(PYTHON) patches/apply.py
	touch $@
.venv/cuda: $(wildcard env/requirements.txt)
	python3 -m venv .venv
	.venv/bin/pip install -q -r $<
	$(PYTHON) patches/apply.py
	touch $@
patch:  ## apply the hidden-states patch to the installed SGLang
	$(PYTHON) patches/apply.py
models/smollm2-135m $(SETS):
	$(PYTHON) scripts/embedded.py $(subst -135m,,$(basename $(@F))) $@
# Two files of tests at a time, each process on one core: SGLang's threads that wait for each other's core stop it dead.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
test: setup models/smollm2-135m  ## everything that a CPU can test
	$(PYTEST) tests
test-fast: setup  ## what needs no server
	$(PYTEST) -m "not slow" tests

##@ Help
help:  ## this text
	@awk -F ':.*## ' '/^##@ /{print "\n" substr($$0,5)} /^[a-z-]+:.*## /{printf "  make %-10s %s\n",$$1,$$2}' Makefile
	@printf '\nTARGET=%s (of: %s)  DATA=%s  NAME=%s  RUNS=%s\n' '$(TARGET)' '$(patsubst env/%.env,%,$(filter-out env/local.env,$(wildcard env/*.env)))' '$(DATA)' '$(NAME)' '$(RUNS)'
	@printf '%s\n' '01: $(strip $(GENERATE))' '02: $(strip $(PREPARE))' '03: $(strip $(EXTRACT))' '04: $(strip $(TRAIN))' '05: $(strip $(EVAL))'
	@printf 'Change a setting on the command line: make train NAME=hot LR=3e-4\n'
.PHONY: generate prepare extract train eval all demo launch tail stop status doctor plan show report verify setup patch test test-fast help ALWAYS
