# shellcheck shell=sh
# run/packages.sh: sourced by run/demo and run/check.
# no_operands NAME HELP ARGUMENT...: prints HELP for --help; anything else is refused.
no_operands() {
    name=$1 help=$2
    shift 2
    if [ $# -eq 1 ] && [ "$1" = --help ]; then
        printf '%s: %s\nusage: %s\n' "$name" "$help" "$name"
        exit 0
    fi
    [ "${1:-}" != --help ] || shift
    [ $# -eq 0 ] || {
        echo "$name: unexpected \"$1\"; it takes nothing but --help" >&2
        exit 2
    }
}
# install_packages PACKAGE...: installs those that are missing, with apt-get, as root or through sudo; does
# nothing when all are there.
install_packages() {
    missing=
    if ! command -v dpkg-query >/dev/null 2>&1; then
        echo "run: this is no Debian: install what Debian calls $* by hand, then call make" >&2
        return 0
    fi
    for package in "$@"; do
        case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
        "install ok installed") continue ;;
        esac
        # Node and npm come in one package outside Debian.
        case $package in
        nodejs | npm) command -v "${package%js}" >/dev/null 2>&1 && continue ;;
        esac
        missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" -eq 0 ]; then
        as_root='env'
    elif command -v sudo >/dev/null 2>&1; then
        as_root="sudo env"
    else
        echo "run: missing packages:$missing; install them as root, or install sudo" >&2
        return 1
    fi
    echo "run: installing$missing" >&2
    # Word splitting is meant: a list of names without blanks, and a command with its argument.
    # shellcheck disable=SC2086
    {
        $as_root DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2 </dev/null &&
            $as_root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >&2 </dev/null
    } || {
        echo "run: apt-get could not install$missing" >&2
        return 1
    }
}
# shellcheck disable=SC2034
build_packages="gcc make libc6-dev liburing-dev libnng-dev libcjson-dev libpcre2-dev libedit-dev libnuma-dev libmicrohttpd-dev libcurl4-openssl-dev libssl-dev ca-certificates"
