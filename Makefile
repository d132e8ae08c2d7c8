# The menu of verbs. Each is a script that also runs by itself; CI runs `make test` and nothing else.
.DEFAULT_GOAL := menu
.PHONY: menu setup demo test campaigns frameworks megatron browser oldest servers wheel bench bench-quick lint docs clean

menu:
	@echo "make setup | demo | test | campaigns | frameworks | megatron | browser | oldest | servers | wheel | bench | bench-quick | lint | docs | clean      (start with: make demo)"

# A virtual environment in .venv with the pinned tools and the wheel built from these sources, as it is shipped.
setup:
	@scripts/setup.sh

# Trains, is killed in the middle of a save, resumes on other layouts, compares the loss curves; with
# STORE=s3://bucket/prefix the checkpoints are there.
demo: setup
	@.venv/bin/python examples/demo.py --store="$(STORE)"

# Everything that CI runs.
test:
	@python3 scripts/test.py

# What `make test` leaves out: many more seeds and kills, second instances, MinIO, chance failures; for two hours.
campaigns: setup
	@python3 scripts/campaigns.py

# The tests with the packages of trainers, in an environment of their own.
frameworks: setup
	@scripts/frameworks.sh

# The tests with Megatron-Core, in an environment of their own.
megatron: setup
	@scripts/megatron.sh

# The tests of the command's pages in a real browser, the system's chromium.
browser: setup
	@scripts/browser.sh

# The Python tests with the oldest PyTorch that works.
oldest: setup
	@scripts/oldest.sh

# Installs the storage servers that the tests use.
servers:
	@scripts/servers.sh install

# The wheels that are shipped in dist/: Linux with glibc 2.28 or later, x86_64 and aarch64; built, audited, tried out.
wheel: setup
	@scripts/wheel.sh

# Every measure beside other systems and beside the machine's own rates, on a machine left alone.
bench: setup
	@scripts/bench.sh

# The same, small, to see that it works: its figures mean nothing.
bench-quick: setup
	@scripts/bench.sh --quick

# Formats what can be formatted and reports the rest.
lint: setup
	@scripts/lint.sh

# The guide for users in target/site/index.html, Rust pages in target/doc.
docs: setup
	@scripts/docs.sh

# Removes what the other words made; the sources stay.
clean:
	@scripts/clean.sh
