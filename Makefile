# Farpool: every task of a developer, a user or CI, by name. `make help` lists them.

PREFIX ?= /usr/local
DESTDIR ?=
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET_DIR)/release
FARPOOL := $(RELEASE)/farpool
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin

.DEFAULT_GOAL := help
.PHONY: help deps build test test-fast lint fuzz soak demo rack-demo sim-demo kv-demo bench measurements
.PHONY: man completions install install-files uninstall dist dist-check deny clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## install what building, testing and the demo need and what is missing
	@scripts/install-deps.sh

build: ## build the release binary and the preload library into target/release
	@scripts/install-deps.sh build
	cargo build --release --workspace

test: ## run every test; the last line says how many passed, failed and were skipped
	@scripts/install-deps.sh test
	scripts/test.sh

test-fast: ## run unit and property tests only
	scripts/test.sh --fast

lint: ## check formatting, clippy's warnings and the links of the documentation
	@scripts/install-deps.sh build
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps

fuzz: ## fuzz every decoder for 20 s (FUZZ_SECONDS=n), with the stable compiler
	@scripts/install-deps.sh build
	scripts/fuzz.sh $(or $(FUZZ_SECONDS),20)

soak: ## try SEEDS=n seeds (100000) of pool, fabric and blade under simulated faults
	@scripts/install-deps.sh build
	cargo run --release -p farpool-vopr -- --seeds $(or $(SEEDS),100000) --from $(or $(FROM),0)

demo: deps build ## run the main job on real records and print the table
	$(FARPOOL) demo

rack-demo: deps build ## run five hosts that lend each other memory, and let some of it fail (root)
	$(FARPOOL) demo rack $(if $(QUICK),--quick)

sim-demo: deps build ## capture a real program, simulate far memory for it, write pages with plots
	scripts/sim-demo.sh $(FARPOOL) $(TARGET_DIR)/sim-demo

kv-demo: deps build ## farpool kv beside memcached and redis under the same load: a table (about 8 minutes)
	@scripts/install-deps.sh test
	scripts/kv-demo.sh

bench: deps build ## measure, each row beside this machine's floor
	$(FARPOOL) bench

measurements: deps build ## measure all of docs/researchers/measurements.md and write it (SECTIONS="costs demo")
	scripts/measurements.py $(SECTIONS)

man: build ## write the manual pages into target/man
	$(FARPOOL) man --out $(TARGET_DIR)/man

completions: build ## write the shell completions into target/completions
	@mkdir -p $(TARGET_DIR)/completions
	$(FARPOOL) completions bash >$(TARGET_DIR)/completions/farpool
	$(FARPOOL) completions zsh >$(TARGET_DIR)/completions/_farpool
	$(FARPOOL) completions fish >$(TARGET_DIR)/completions/farpool.fish

install: man completions ## install under PREFIX (default /usr/local); DESTDIR is honoured
	$(MAKE) --no-print-directory install-files
	@echo 'users who are not root have sidecars (any program, static ones too) after:'
	@echo '  sudo setcap cap_sys_ptrace=p $(PREFIX)/bin/farpool    (docs/users/sidecar.md)'

# Shared by install and dist; everything must be built already.
install-files:
	scripts/install-stripped.sh $(FARPOOL) $(DESTDIR)$(PREFIX)/bin
	scripts/install-stripped.sh $(RELEASE)/libfarpool_preload.so $(DESTDIR)$(PREFIX)/lib/farpool
	scripts/install-stripped.sh $(RELEASE)/libfarpool_capture_qemu.so $(DESTDIR)$(PREFIX)/lib/farpool
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	install -m644 $(TARGET_DIR)/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	for unit in kv control node; do \
	    sed 's|/usr/local/bin/|$(PREFIX)/bin/|' examples/systemd/farpool-$$unit.service \
	        >$(DESTDIR)$(PREFIX)/lib/systemd/system/farpool-$$unit.service; \
	done
	install -Dm644 $(TARGET_DIR)/completions/farpool $(DESTDIR)$(PREFIX)/share/bash-completion/completions/farpool
	install -Dm644 $(TARGET_DIR)/completions/_farpool $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_farpool
	install -Dm644 $(TARGET_DIR)/completions/farpool.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/farpool.fish

uninstall: ## remove what install put under PREFIX
	rm -rf $(DESTDIR)$(PREFIX)/lib/farpool
	rm -f $(DESTDIR)$(PREFIX)/bin/.debug/farpool.debug
	rmdir --ignore-fail-on-non-empty $(DESTDIR)$(PREFIX)/bin/.debug 2>/dev/null || true
	rm -f $(DESTDIR)$(PREFIX)/bin/farpool $(DESTDIR)$(PREFIX)/share/man/man1/farpool{,-*}.1
	for unit in kv control node; do \
	    rm -f $(DESTDIR)$(PREFIX)/lib/systemd/system/farpool-$$unit.service; \
	done
	rm -f $(DESTDIR)$(PREFIX)/share/bash-completion/completions/farpool
	rm -f $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_farpool
	rm -f $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/farpool.fish

dist: man completions ## make a tarball, a Debian package and checksums in target/dist
	scripts/dist.sh $(TARGET_DIR)/dist $(RELEASE)

dist-check: dist ## install the Debian package on a bare system and try it there (root, debootstrap)
	scripts/dist-check.sh $(TARGET_DIR)/dist

deny: ## check licences, sources and known vulnerabilities of dependencies (cargo-deny)
	scripts/deny.sh

clean: ## remove what the build made
	cargo clean
