#!/usr/bin/env bash
# Functions for scripts that have an environment of their own, beside .venv: target/NAME with the packages of
# requirements/NAME.txt. To be sourced from the root of the checkout.
set -euo pipefail

unset PYTHONDONTWRITEBYTECODE # with it each process compiles what it imports again: PyTorch alone for seconds

digest() { sha256sum | cut -d' ' -f1; }

# here: what a stamp holds beside a digest. An environment names its own place; a copy of one would run the other's.
here() { printf ' in %s' "$PWD"; }

# is_stamped VENV NAME DIGEST: whether that is installed already. Stamps live in the environment that they speak of.
is_stamped() { [[ -f "$1/$2.stamp" && "$(<"$1/$2.stamp")" == "$3" ]]; }

# make_environment NAME [PYTHON [FILE]]: makes target/NAME, or brings it up to date, with the packages of FILE or of
# requirements/NAME.txt. Lock files name every package: what is installed is what they say and nothing else.
make_environment() {
    local name=$1 python=${2:-.venv/bin/python} at=target/$1 file=${3:-requirements/$1.txt} requirements
    if [[ ! -x .venv/bin/uv ]]; then
        printf '%s: no environment: run `make setup` first\n' "$name" >&2
        return 1
    fi
    requirements=$(digest <"$file")$(here)
    if "$at/bin/python" -c '' 2>/dev/null && is_stamped "$at" requirements "$requirements"; then
        return
    fi
    rm -rf "$at"
    "$python" -m venv "$at"
    echo "$name: installing $file (torch is large: minutes on a slow line)"
    .venv/bin/uv pip install --quiet --no-deps --python "$at/bin/python" --requirement "$file"
    echo "$requirements" >"$at/requirements.stamp"
}

# unpack_packages PLACE PACKAGE=VERSION...: unpacks Debian's packages below PLACE without installing them; versions are
# beginnings of Debian's.
unpack_packages() {
    local place=$1 package name version
    shift
    if is_stamped "$place" packages "$*"; then
        return
    fi
    rm -rf "$place"
    mkdir -p "$place"
    for package in "$@"; do
        name=${package%%=*} version=${package#*=}
        echo "unpacking $name $version"
        (cd "$place" && apt-get download --quiet=2 "$name")
        if [[ -z $(compgen -G "$place/${name}_$version*.deb") ]]; then
            echo "expected $name $version, found $(cd "$place" && ls ./*.deb)" >&2
            return 1
        fi
        dpkg-deb --extract "$place/$name"_*.deb "$place"
        rm "$place/$name"_*.deb
    done
    echo "$*" >"$place/packages.stamp"
}

# install_what_is_tested NAME: puts the shardfast of .venv into target/NAME. Its extension is of Python's stable ABI and
# links with no framework, so nothing is compiled again.
install_what_is_tested() {
    local from into
    from=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    into=$("target/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    rm -rf "$into"/shardfast "$into"/shardfast-*.dist-info
    cp -r "$from"/shardfast "$from"/shardfast-*.dist-info "$into"
    # The command, which names its Python.
    sed "s|$PWD/.venv/bin/|$PWD/target/$1/bin/|g" .venv/bin/shardfast >"target/$1/bin/shardfast"
    chmod +x "target/$1/bin/shardfast"
}
