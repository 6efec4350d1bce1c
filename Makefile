# make help lists the targets.
ENV ?= local
NODES ?=
NODE ?= head
PLAN ?=
VENV := .venv/bin
CLUSTER := $(VENV)/cluster --env $(ENV)
export MODE
COUNT := $(if $(NODES),--nodes $(NODES))
CONFIRMED := $(if $(YES),--yes)
MAKEFLAGS += --no-print-directory
NEEDS :=
# What bin/setup installs besides Python packages; the other targets need nothing else.
deploy plan status doctor scale shell put get env destroy clean bench run comm tune lab adopt release-hosts renew training-image: NEEDS := nodes
perf-first perf-deploy perf-comm: NEEDS := nodes
check: NEEDS := check
docs: NEEDS := browser
test test-long test-cuda drill: NEEDS := nodes check browser
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' Makefile)

##@ Cluster (ENV=local unless set; docs/README.md has a page per environment)

deploy: setup ## create or repair the cluster, configure and validate it   [ENV= NODES= MODE= REPLACE=1]
	@$(CLUSTER) deploy $(COUNT) $(CONFIRMED) $(if $(REPLACE),--replace)

plan: setup ## show what a deploy would change, without changing it   [ENV= NODES=]
	@$(CLUSTER) plan $(COUNT)

status: setup ## show each node and whether it works   [ENV=]
	@$(CLUSTER) status

config: setup ## print the completed cluster.yml: every field and default   [ENV= NODES=]
	@$(CLUSTER) config $(COUNT)

doctor: setup ## find what is missing or broken, with the command that fixes it   [ENV=]
	@$(CLUSTER) doctor

scale: setup ## change the number of nodes   NODES=n [ENV= YES=1]
	@$(CLUSTER) scale $(COUNT) $(CONFIRMED)

shell: setup ## log in to a node as the training account; ADMIN=1: as the account with sudo   [NODE=w1 ADMIN=1 ENV=]
	@$(CLUSTER) shell $(NODE) $(if $(ADMIN),--admin)

put: setup ## copy a file or folder to the share   SRC=images [DST=datasets ENV=]
	@$(CLUSTER) put '$(SRC)' '$(or $(DST),datasets)'

get: setup ## copy a file or folder from the share   SRC=results [DST=. ENV=]
	@$(CLUSTER) get '$(SRC)' '$(or $(DST),.)'

env: setup ## copy an environment under a new name, with subnets that are free on this machine   NAME=x [FROM=local]
	@$(VENV)/cluster env '$(NAME)' --from $(or $(FROM),local)

destroy: setup ## remove every node, network, key and state file   [ENV= YES=1]
	@$(CLUSTER) destroy $(CONFIRMED)

clean: setup ## remove cached images and packages that nothing uses
	@$(CLUSTER) clean

##@ Measure

bench: setup ## sweep 1 to N nodes and write the report; deploys if no cluster is up; PLAN=elastic: faults   [ENV= PLAN=]
	@$(VENV)/bench $(if $(filter elastic,$(PLAN)),elastic,sweep) --env $(ENV) $(if $(filter-out elastic,$(PLAN)),--plan $(PLAN))

run: setup ## run your own script on the nodes   SCRIPT=train.py [ARGS= NODES= GPUS_PER_NODE= MIN_NODES= MAX_NODES= ENGINE=horovod|ddp REQUIREMENTS= RESUME= OPTIONS=--detach ENV=]
	@$(VENV)/bench run --env $(ENV) $(COUNT) $(if $(MIN_NODES),--min-nodes $(MIN_NODES)) $(if $(MAX_NODES),--max-nodes $(MAX_NODES)) $(if $(GPUS_PER_NODE),--gpus-per-node $(GPUS_PER_NODE)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(REQUIREMENTS),--requirements '$(REQUIREMENTS)') $(if $(RESUME),--resume '$(RESUME)') $(OPTIONS) --folder '$(dir $(SCRIPT))' -- python '$(notdir $(SCRIPT))' $(ARGS)

comm: setup ## measure collectives as a share of the link rate   [ENV= FABRIC=]
	@$(VENV)/bench comm --env $(ENV) $(if $(FABRIC),--fabric $(FABRIC))

tune: setup ## find and keep the fastest settings of a fabric, in five minutes   [ENV= FABRIC=]
	@$(VENV)/bench tune --env $(ENV) $(if $(FABRIC),--fabric $(FABRIC)) --explain

report: setup ## write the report of a run again   [RUN=folder]
	@$(VENV)/bench report $(or $(RUN),latest)

example: setup ## open the report of a small run that comes with the package
	@$(VENV)/bench report --example

explain: setup ## find the weakest link of a run, the next one, and what to change   [RUN=folder]
	@$(VENV)/bench explain $(or $(RUN),latest)

predict: setup ## compare the predictor with every published table
	@$(VENV)/bench predict --validate

jupyter: setup ## open a run in JupyterLab on this machine   [RUN=folder]
	@$(VENV)/bench jupyter $(or $(RUN),latest)

lab: setup ## show the address of the cluster's JupyterLab and its token file; TOKEN=1: the token itself   [ENV= TOKEN=1]
	@$(CLUSTER) lab $(if $(TOKEN),--show-token)

##@ Some environments only

cost: setup ## show the price per hour, the cost so far, and the budget   [ENV=aws]
	@$(CLUSTER) cost

adopt: setup ## show the host keys of existing machines and pin them   [ENV=baremetal]
	@$(CLUSTER) adopt

release-hosts: setup ## give existing machines back as they were; list the packages that stay   [ENV=baremetal YES=1]
	@$(CLUSTER) release-hosts $(CONFIRMED)

renew: setup ## keep the nodes for longer: a testbed's reservation, or the date at which EC2 nodes end   [ENV=aws]
	@$(CLUSTER) renew

training-image: setup ## build the container image that GPULab jobs run   [DEVICE=cuda|cpu]
	@$(VENV)/cluster --env gpulab training-image --device $(or $(DEVICE),cuda)

artefacts: setup ## list every package, wheel, image and file with version and checksum, for sites without internet   [ENV=]
	@$(CLUSTER) artefacts

##@ Development (CONTRIBUTING.md)

setup: ## install Python packages into .venv, and the OS packages that the command at hand needs   [PYTHON=]
	@python3 bin/setup $(NEEDS)

check: setup ## run linters, type checks, unit tests and command-line tests, in three minutes
	@$(VENV)/python tests/run.py check

test: setup ## run everything CI runs, as root; FAST=1: check, Terraform, one deploy and sweep, three roles   [FAST=1]
	@$(VENV)/python tests/run.py $(if $(FAST),fast,all)

test-terraform: setup ## run the Terraform tests alone
	@$(VENV)/python tests/run.py terraform

test-cuda: setup ## compile Horovod for both CUDA stacks and the NVIDIA driver without a GPU: 6 GB, half an hour
	@$(VENV)/python tests/molecule/run.py -j 1 horovod/cuda horovod/cuda12 nvidia_driver/forced

test-long: test-cuda ## run what make test has no time for: CUDA builds, tests/long (hours), three drills of 20 minutes
	@$(VENV)/pytest -v tests/long
	@for seed in 1 2 3; do $(VENV)/python tests/drill/run.py --minutes 20 --seed $$seed || exit 1; done

drill: setup ## break local nodes, controller and disk during sweeps and check that nothing is lost   [MINUTES=20 SEED=1]
	@$(VENV)/python tests/drill/run.py --minutes $(or $(MINUTES),20) --seed $(or $(SEED),1)

docs: setup ## generate tables, schema, the report's picture and its verdict
	@$(VENV)/python tests/docs.py

lock: setup ## pin the Python packages of requirements/ again
	@bin/lock

help: ## list the targets
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

##@ Measure this project itself

perf-first: setup ## time the first run of a new user, part by part, in a clean clone with empty caches   [ARGS="--busy --again"]
	@$(VENV)/python tests/perf/first.py $(ARGS)

perf-deploy: setup ## measure deploy times: 4 and 10 nodes from a cached image
	@$(VENV)/python tests/perf/deploy.py

perf-comm: setup ## measure collectives and steps, tuned against defaults, on 2, 4 and 8 nodes   [PART=large|small|step]
	@$(VENV)/python tests/perf/comm.py $(PART)

perf-predict: setup ## measure how fast predictions are
	@$(VENV)/python tests/perf/predict.py

perf-report: setup ## measure how fast 10,000 trials become a report
	@$(VENV)/python tests/perf/report_scale.py

perf-data: setup ## measure the data path against the usual pipeline and against cat
	@OMP_NUM_THREADS=1 $(VENV)/python tests/perf/data.py
