# Every program has a manual page, and the pages say what the programs say.
load helpers

MAN=$ROOT/docs/man
programs() { ls "$K3_BIN"; echo k3-run; }
help_of() { # help_of PROGRAM: of k3-bench with that of its parts
    local part
    if [ "$1" = k3-run ]; then "$ROOT/run/k3-run" --help; else "$K3_BIN/$1" --help; fi
    [ "$1" != k3-bench ] || for part in kernels pass context io decode sweep; do "$K3_BIN/k3-bench" $part --help; done
}
# The options that stand at the left of a line of --help; "--a N, --b N" are two.
help_options() { # help_options PROGRAM
    help_of "$1" | sed -n 's/^  \(--[a-z].*\)$/\1/p' | sed 's/   *[^ ].*$//' | grep -o -- '--[a-z][a-z0-9-]*' | sort -u
}
page_options() { # page_options PROGRAM
    grep '^\.It Fl -' "$MAN/$1.1" | grep -o -- 'Fl -[a-z][a-z0-9-]*' | sed 's/Fl -/--/' | sort -u
}

@test "every program has a page, and every page a program" {
    diff <(programs | sort) <(cd "$MAN" && ls ./*.1 | sed 's,^\./,,; s/\.1$//' | sort)
    [ -e "$MAN/k3.7" ]
    [ -e "$MAN/k3.conf.5" ]
}

@test "every option of --help is in the page, and the other way round" {
    local p bad=0
    for p in $(programs); do
        [ "$(help_options "$p" | wc -l)" -ge 2 ]
        diff <(help_options "$p") <(page_options "$p") || { echo "above: of --help (<) and of docs/man/$p.1 (>)"; bad=1; }
    done
    [ $bad -eq 0 ]
}

@test "the commands of k3ctl and k3-run, the parts of k3-bench" {
    diff <("$K3_BIN/k3ctl" nothing 2>&1 | sed 's/.*commands are //' | tr -d ' ' | tr , '\n' | sort) \
        <(sed -n 's/^\.It Cm \([a-z]*\).*/\1/p' "$MAN/k3ctl.1" | sort -u)
    diff <("$ROOT/run/k3-run" nothing 2>&1 | sed 's/.*there are //; s/ and /, /' | tr -d ' ' | tr , '\n' | sort) \
        <(sed -n 's/^\.It Cm \([a-z]*\).*/\1/p' "$MAN/k3-run.1" | sort -u)
    diff <("$K3_BIN/k3-bench" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p' | sort) <(sed -n 's/^\.Ss //p' "$MAN/k3-bench.1" | sort)
}

@test "the keys of a configuration are those that k3-run takes" {
    diff <(sed -n '/^value_options="/,/^flag_options=/p' "$ROOT/run/k3-run" | sed 's/.*_options="//; s/"$//' | tr -s ' ' '\n' | grep -vx 'config\|' | sort) \
        <(sed -n 's/^\.It Cm \([a-z-]*\) .*/\1/p' "$MAN/k3.conf.5" | sort)
}

@test "mandoc has nothing to complain of, and references lead somewhere" {
    command -v mandoc >/dev/null || skip "needs mandoc"
    mandoc -T lint -W warning "$MAN"/*
    while read -r name section; do
        [ -e "$MAN/$name.$section" ] || { echo "no $name($section)"; return 1; }
    done < <(grep -ho 'Xr [a-z0-9.-]* [0-9]' "$MAN"/* | cut -d' ' -f2- | sort -u)
}

@test "make install puts them where man looks" {
    [ "$K3_BUILD" = "$ROOT/build/release" ] || skip "installs the release build"
    make -s -C "$ROOT" install DESTDIR="$BATS_TEST_TMPDIR" PREFIX=/usr >/dev/null
    for f in "$MAN"/*; do
        cmp "$f" "$BATS_TEST_TMPDIR/usr/share/man/man${f##*.}/${f##*/}"
    done
    command -v man >/dev/null || return 0
    MANPATH=$BATS_TEST_TMPDIR/usr/share/man man -w k3-fetch k3.conf k3
}
