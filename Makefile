# k3: one Makefile.  `make help` lists what it can do.
SHELL := /bin/sh
CC ?= cc
PREFIX ?= /usr/local
DESTDIR ?=
V ?= release
B := build/$(V)
# Commands are shown in short; `make Q=` shows them whole.
Q ?= @
BIN := $(if $(filter release,$(V)),bin,$(B)/bin)

WARN := -Wall -Wextra -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wshadow -Wno-missing-field-initializers
OPT_release := -O2 -g
OPT_asan := -O1 -g -fsanitize=address -fno-omit-frame-pointer
OPT_ubsan := -O1 -g -fsanitize=undefined -fno-sanitize-recover=undefined
OPT_tsan := -O1 -g -fsanitize=thread
CPPFLAGS += -D_GNU_SOURCE -I. -DK3_BUILD=\"$(V)\"
ALL_CFLAGS = -std=gnu11 $(WARN) -ffp-contract=off -fno-fast-math -pthread $(CFLAGS) $(OPT_$(V))
LIBS := -luring -lnuma -lnng -lcjson -lpcre2-8 -ledit -lmicrohttpd -lpthread -lm

DAEMONS := k3-trunkd k3-expertd k3-computed k3-router k3-keeper
TOOLS := $(patsubst tools/%.c,%,$(wildcard tools/k3*.c))
LIB_SRC := $(wildcard text/*.c ipc/*.c shm/*.c model/*.c io/*.c constrain/*.c)
DAEMON_SRC := $(filter-out %/main.c,$(wildcard $(addsuffix /*.c,$(DAEMONS))))
TOOL_LIB_SRC := $(filter-out tools/k3%.c,$(wildcard tools/*.c))
ALL_SRC := $(LIB_SRC) $(DAEMON_SRC) $(TOOL_LIB_SRC)
UNIT_SRC := $(wildcard tests/unit/*_test.c)
UNIT_LIB_SRC := $(filter-out %_test.c,$(wildcard tests/unit/*.c))
PROBE_SRC := $(wildcard tests/probe/*.c)
FUZZ_SRC := $(wildcard tests/fuzz/*_fuzz.c)
PROGRAMS := $(addprefix $(BIN)/,$(foreach d,$(DAEMONS),$(if $(wildcard $(d)/main.c),$(d))) $(TOOLS))
UNITS := $(patsubst tests/unit/%.c,$(B)/unit/%,$(UNIT_SRC))
PROBES := $(patsubst tests/probe/%.c,$(B)/probe/%,$(PROBE_SRC))
FUZZERS := $(patsubst tests/fuzz/%.c,$(B)/fuzz/%,$(FUZZ_SRC))

all: $(PROGRAMS)
tests-build: $(PROGRAMS) $(UNITS) $(PROBES)

# The vector files carry their own instruction flags and are chosen at run time.
%_avx2.o: ISA := -mavx2 -mfma -mf16c
%_sse42.o: ISA := -msse4.2
%_avx512.o: ISA := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c
$(B)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo '  CC   $<'
	$(Q)$(CC) $(CPPFLAGS) $(ALL_CFLAGS) $(ISA) -MMD -MP -c -o $@ $<

# The page is part of k3-router.  The folder is among what it depends on, so that a file that is removed leaves it.
WEB := $(sort $(wildcard k3-router/web/*.html k3-router/web/*.css k3-router/web/*.js k3-router/web/*.svg))
$(B)/k3-router/web_files.c: k3-router/embed $(WEB) k3-router/web
	@mkdir -p $(@D)
	@echo '  EMBED $@'
	$(Q)k3-router/embed $(WEB) >$@.new && mv $@.new $@
$(B)/k3-router/web_files.o: $(B)/k3-router/web_files.c Makefile
	@echo '  CC   $<'
	$(Q)$(CC) $(CPPFLAGS) $(ALL_CFLAGS) -MMD -MP -c -o $@ $<

ALL_OBJ := $(ALL_SRC:%.c=$(B)/%.o) $(B)/k3-router/web_files.o
$(B)/libk3.a: $(ALL_OBJ)
	@rm -f $@
	@echo '  AR   $@'
	$(Q)ar rcs $@ $(ALL_OBJ)

define daemon_rule
$(BIN)/$(1): $(B)/$(1)/main.o $(B)/libk3.a
	@mkdir -p $$(@D)
	@echo '  LINK $$@'
	$$(Q)$$(CC) $$(ALL_CFLAGS) $$(LDFLAGS) -o $$@ $$^ $$(LIBS)
endef
$(foreach d,$(DAEMONS),$(eval $(call daemon_rule,$(d))))
# The only one that talks to the internet.
$(BIN)/k3-fetch: LIBS += -lcurl -lcrypto
$(BIN)/%: $(B)/tools/%.o $(B)/libk3.a
	@mkdir -p $(@D)
	@echo '  LINK $@'
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/unit/%: $(B)/tests/unit/%.o $(UNIT_LIB_SRC:%.c=$(B)/%.o) $(B)/libk3.a
	@mkdir -p $(@D)
	@echo '  LINK $@'
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS) -lcmocka
$(B)/probe/%: $(B)/tests/probe/%.o $(UNIT_LIB_SRC:%.c=$(B)/%.o) $(B)/libk3.a
	@mkdir -p $(@D)
	@echo '  LINK $@'
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS) -lcmocka

# Fuzz targets are built by clang with libFuzzer, in their own tree: make fuzz
fuzz: ; $(MAKE) V=fuzz CC=clang fuzzers
OPT_fuzz := -O1 -g -fsanitize=fuzzer-no-link,address,undefined
# No target computes, and clang takes minutes and gigabytes for the unrolled products when it instruments them.
build/fuzz/k3-computed/kernels_mul_%.o: OPT_fuzz := -O1 -g
fuzzers: $(FUZZERS)
build/fuzz/fuzz/%: build/fuzz/tests/fuzz/%.o build/fuzz/libk3.a
	@mkdir -p $(@D)
	@echo '  LINK $@'
	$(Q)$(CC) $(ALL_CFLAGS) -fsanitize=fuzzer,address,undefined -o $@ $^ $(LIBS)

check: tests-build
	tests/run $(BIN) $(B)
asan tsan ubsan: ; $(MAKE) V=$@ check
demo: all
	run/demo-session
bench: all
	$(BIN)/k3-bench

install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/k3/run
	install -m 755 $(PROGRAMS) $(DESTDIR)$(PREFIX)/bin
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/man/man,1 5 7)
	$(foreach n,1 5 7,install -m 644 docs/man/*.$(n) $(DESTDIR)$(PREFIX)/share/man/man$(n) &&) true
	run/install-files "$(DESTDIR)$(PREFIX)" "$(PREFIX)"
clean:
	rm -rf build bin
help:
	@echo 'make               build all programs into bin/'
	@echo 'make check         build and run all tests that need no downloaded weights'
	@echo 'make demo          start the family on the demo model and ask it one question'
	@echo 'make bench         measure (k3-bench)'
	@echo 'make asan|ubsan|tsan   the test suite under a sanitizer, in its own tree'
	@echo 'make fuzz          build the fuzz targets (clang) into build/fuzz/fuzz/'
	@echo 'make install       PREFIX=/usr/local DESTDIR='
	@echo 'make clean         remove build/ and bin/'
.PHONY: all tests-build check asan tsan ubsan demo bench install clean help fuzz fuzzers
.SECONDARY:
-include $(shell find build/$(V) -name '*.d' 2>/dev/null)
