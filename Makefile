# make help lists the targets. ENV=local NODES=4 unless said otherwise.
ENV ?= local
NODES ?=
NODE ?= head
PLAN ?= quick
VENV := .venv/bin
CLUSTER := $(VENV)/cluster --env $(ENV)
export MODE
COUNT := $(if $(NODES),--nodes $(NODES))
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

deploy: setup ## create (or repair) the cluster, configure and validate it   [ENV= NODES= MODE=]
	@$(CLUSTER) deploy $(COUNT)

bench: setup ## sweep 1 to N nodes and write the report; deploys when nothing is up   [ENV= PLAN=]
	@$(VENV)/bench sweep --env $(ENV) --plan $(PLAN)

report: setup ## draw the report of a run again   [RUN=folder]
	@$(VENV)/bench report $(or $(RUN),latest)

explain: setup ## the weakest link of a run, the next one, and what to change   [RUN=folder]
	@$(VENV)/bench explain $(or $(RUN),latest)

comm: setup ## time collectives as a share of the wire   [ENV= FABRIC=]
	@$(VENV)/bench comm --env $(ENV) $(if $(FABRIC),--fabric $(FABRIC))

tune: setup ## find and keep the fastest settings of a fabric, in five minutes   [ENV= FABRIC=]
	@$(VENV)/bench tune --env $(ENV) $(if $(FABRIC),--fabric $(FABRIC)) --explain

jupyter: setup ## open a run in JupyterLab on this machine   [RUN=folder]
	@$(VENV)/bench jupyter $(or $(RUN),latest)

lab: setup ## where the cluster's JupyterLab is and where its token is kept   [ENV=]
	@$(CLUSTER) lab

predict: setup ## hold the predictor against every published table
	@$(VENV)/bench predict --validate

status: setup ## what each node is and whether it works
	@$(CLUSTER) status

scale: setup ## change the number of nodes   NODES=n
	@$(CLUSTER) scale $(COUNT)

shell: setup ## log in to a node   NODE=w1
	@$(CLUSTER) shell $(NODE)

doctor: setup ## what is missing or broken, and the command that fixes it
	@$(CLUSTER) doctor

plan: setup ## what a deploy would change, without changing it   [ENV= NODES=]
	@$(CLUSTER) plan $(COUNT)

adopt: setup ## show the host keys of existing machines and pin them   [ENV=baremetal]
	@$(CLUSTER) adopt

cost: setup ## what the nodes cost per hour and so far, and the budget   [ENV=aws]
	@$(CLUSTER) cost

artefacts: setup ## every package, wheel, image and file with version and checksum, for sites without internet   [ENV=]
	@$(CLUSTER) artefacts

.PHONY: training-image renew artefacts
training-image: setup ## make the container image that GPULab jobs run   [DEVICE=cuda|cpu]
	@$(VENV)/cluster --env gpulab training-image --device $(or $(DEVICE),cuda)

renew: setup ## keep the nodes of a testbed for longer   [ENV=virtualwall]
	@$(CLUSTER) renew

destroy: setup ## remove every node, network, key and state of ENV
	@$(CLUSTER) destroy

clean: setup ## remove cached images and packages
	@$(CLUSTER) clean

setup: ## install what the commands need: OS packages, Python packages, Terraform
	@python3.11 bin/setup

check: setup ## lint, types, unit tests and commands without a cluster, in under two minutes
	@$(VENV)/python tests/run.py check

test: setup ## everything CI runs: check, terraform, aws, end to end, testbeds, molecule, browser
	@$(VENV)/python tests/run.py all

test-cuda: setup ## what takes 3 GB and a quarter of an hour: compile Horovod for CUDA and the driver's module, without a GPU
	@$(VENV)/python tests/molecule/run.py -j 1 horovod/cuda nvidia_driver/forced

lock: setup ## pin the Python packages of requirements/ again
	@bin/lock

perf-deploy: setup ## measure deploy times: 4 and 10 nodes from a cached image
	@$(VENV)/python tests/perf/deploy.py

perf-comm: setup ## measure collectives and steps, tuned against defaults, on 2, 4 and 8 nodes   [PART=large|small|step]
	@$(VENV)/python tests/perf/comm.py $(PART)

perf-predict: setup ## measure how fast predictions are
	@$(VENV)/python -m bench.predict.perf

perf-report: setup ## measure how fast 10,000 trials become a report
	@$(VENV)/python tests/perf/report_scale.py

perf-data: setup ## measure the data path against the usual pipeline and against cat
	@OMP_NUM_THREADS=1 $(VENV)/python tests/perf/data.py

.PHONY: help deploy bench report explain comm tune jupyter lab predict perf-predict perf-report perf-data status scale shell doctor plan adopt cost destroy clean setup check test test-cuda lock perf-deploy perf-comm
