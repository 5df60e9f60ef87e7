# Thin on purpose: every recipe is a command to type by hand.

.DEFAULT_GOAL := help
.PHONY: help dev docs test chaos fuzz fuzz-short openapi bench-abuse bench-bursts bench-chat bench-idle bench-inbound bench-large-tenant bench-limits bench-resolve bench-sessions bench-streams

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

dev: ## Run a node, Postgres, Redis and a demo tenant on this machine (ARGS="--port 9000")
	@scripts/install-missing
	cargo run -- dev $(ARGS)

test: ## Run all checks of CI: format, lints, tests, a short fuzz run
	@scripts/install-missing
	@scripts/openai-client >/dev/null
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo test --lib --test it
	$(MAKE) --no-print-directory fuzz-short

chaos: ## Kill nodes during work, 20 times (CHAOS_ROUNDS=…, CHAOS_SEED=…)
	@scripts/install-missing
	cargo test --test it -- --ignored chaos:: --nocapture

fuzz: ## Check the API against its OpenAPI document with 10,000 random requests (FUZZ_CASES=…, FUZZ_SEED=…)
	@scripts/install-missing --python
	scripts/fuzz

fuzz-short: ## Run fuzz with 500 requests, as `make test` does
	@scripts/install-missing --python
	FUZZ_CASES=500 scripts/fuzz

openapi: ## Regenerate openapi/openapi.json after a change to the API
	mkdir -p openapi
	cargo run -q -- openapi > openapi/openapi.json.new
	mv openapi/openapi.json.new openapi/openapi.json

docs: ## Regenerate the tables of docs/reference, and build the book if mdbook is installed
	cargo test -q --test it -- --ignored house::docs::reference::write
	@if command -v mdbook >/dev/null; then mdbook build docs; \
	else echo "No book was built: install mdbook with \`cargo install mdbook\`."; fi

bench-abuse: ## Measure the cost of a hostile tenant to another one, and to the memory of a release node
	@scripts/install-missing
	cargo bench --bench abuse

bench-bursts: ## Measure forty concurrent messages, from new and known users, on two release nodes
	@scripts/install-missing
	cargo bench --bench bursts

bench-chat: ## Measure chat, with and without sessions, on a release build, against the bare model and pgbench
	@scripts/install-missing
	cargo bench --bench chat

bench-idle: ## Measure the memory and the start of an idle release node
	@scripts/install-missing
	cargo bench --bench idle

bench-inbound: ## Measure inbound messages and deliveries on a release build, against pgbench
	@scripts/install-missing
	cargo bench --bench inbound

bench-large-tenant: ## Time operator requests for a tenant with millions of rows, on a release build (TURNS=…, DELIVERIES=…)
	@scripts/install-missing
	cargo bench --bench large_tenant

bench-limits: ## Measure the cost of a noisy tenant to a quiet one on a release node
	@scripts/install-missing
	cargo bench --bench limits

bench-resolve: ## Measure the resolution of senders to sessions on a release build, against pgbench
	@scripts/install-missing
	cargo bench --bench resolve

bench-sessions: ## Measure tips, histories and appends on a release build, against pgbench
	@scripts/install-missing
	cargo bench --bench sessions

bench-streams: ## Measure the cost of 10,000 idle event streams on two release nodes (STREAMS=…, CONVERSATIONS=…)
	@scripts/install-missing
	cargo bench --bench streams
