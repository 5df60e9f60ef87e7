# Thin on purpose: every recipe is what you would type yourself.

.DEFAULT_GOAL := help
.PHONY: help dev test chaos fuzz fuzz-short openapi bench-abuse bench-bursts bench-chat bench-idle bench-inbound bench-large-tenant bench-limits bench-resolve bench-sessions bench-streams

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

dev: ## Run everything here: a node, Postgres, Redis, a demo tenant (ARGS="--port 9000")
	@scripts/install-missing
	cargo run -- dev $(ARGS)

test: ## Check everything that CI checks
	@scripts/install-missing
	@scripts/openai-client >/dev/null
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo test --lib --test it
	$(MAKE) --no-print-directory fuzz-short

chaos: ## Kill nodes in the middle of work, 20 times (CHAOS_ROUNDS=…, CHAOS_SEED=…)
	@scripts/install-missing
	cargo test --test it -- --ignored chaos:: --nocapture

fuzz: ## Hold the API to its document with 10,000 random requests (FUZZ_CASES=…, FUZZ_SEED=…)
	@scripts/install-missing --python
	scripts/fuzz

fuzz-short: ## The same with 500, as `make test` does
	@scripts/install-missing --python
	FUZZ_CASES=500 scripts/fuzz

openapi: ## Write openapi/openapi.json anew, after a change to the API
	mkdir -p openapi
	cargo run -q -- openapi > openapi/openapi.json.new
	mv openapi/openapi.json.new openapi/openapi.json

bench-abuse: ## Measure what one hostile tenant costs another, and a release node its memory
	@scripts/install-missing
	cargo bench --bench abuse

bench-bursts: ## Measure forty messages at once, of new and known people, on two release nodes
	@scripts/install-missing
	cargo bench --bench bursts

bench-chat: ## Measure chat, with and without sessions, on a release build, beside the model and pgbench
	@scripts/install-missing
	cargo bench --bench chat

bench-idle: ## Measure the memory and the start of an idle release node
	@scripts/install-missing
	cargo bench --bench idle

bench-inbound: ## Measure messages of platforms and their deliveries on a release build, beside pgbench
	@scripts/install-missing
	cargo bench --bench inbound

bench-large-tenant: ## Time what operators do in a tenant with millions of rows, on a release build (TURNS=…, DELIVERIES=…)
	@scripts/install-missing
	cargo bench --bench large_tenant

bench-limits: ## Measure what a noisy tenant costs a quiet one on a release node
	@scripts/install-missing
	cargo bench --bench limits

bench-resolve: ## Measure who speaks and where it belongs on a release build, beside pgbench
	@scripts/install-missing
	cargo bench --bench resolve

bench-sessions: ## Measure tips, histories and appends on a release build, beside pgbench
	@scripts/install-missing
	cargo bench --bench sessions

bench-streams: ## Count what 10,000 idle event streams on two release nodes cost (STREAMS=…, CONVERSATIONS=…)
	@scripts/install-missing
	cargo bench --bench streams
