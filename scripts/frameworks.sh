#!/usr/bin/env bash
# Runs the tests with other libraries' packages, tests/frameworks:
#
#   scripts/frameworks.sh                 all of them
#   scripts/frameworks.sh gate            for every change: those marked `smoke`, at least one with each package
#   scripts/frameworks.sh with PACKAGE==VERSION...
#                                         those of deepspeed, accelerate, transformers, lightning, grain or
#                                         megatron-energon with this one and these, in target/PACKAGE-VERSION
#   scripts/frameworks.sh ARGUMENT...     pytest with these arguments
#
# Their environment, target/frameworks, holds these packages and the shardfast of .venv. The first time this installs a
# PyTorch, which takes minutes and 5 GB on x86_64, unless uv has it in its cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/environment.sh

# DeepSpeed is built from its source, with the torch that is installed, and without its kernels: seconds.
readonly deepspeed=0.19.8

install_as_it_is() {
    DS_BUILD_OPS=0 .venv/bin/uv pip install --quiet --python target/frameworks/bin/python --no-build-isolation \
        --no-deps "$@"
}

make_environment frameworks
if ! is_stamped target/frameworks deepspeed "$deepspeed"; then
    install_as_it_is "deepspeed==$deepspeed"
    echo "$deepspeed" >target/frameworks/deepspeed.stamp
fi
install_what_is_tested frameworks
if (($# >= 2)) && [[ $1 == with ]]; then
    case $2 in
        deepspeed==*) tests=(tests/frameworks/test_deepspeed{,_block,_parallel,_masters}.py) ;;
        accelerate==*) tests=(tests/frameworks/test_accelerate{,_loaders}.py) ;;
        grain==* | megatron-energon==*) tests=(tests/frameworks/test_other_loaders.py) ;;
        transformers==* | lightning==*) tests=("tests/frameworks/test_${2%%==*}.py") ;;
        *)
            echo "frameworks: with $2: expected deepspeed, accelerate, transformers, lightning, grain or" \
                "megatron-energon first" >&2
            exit 2
            ;;
    esac
    other=$PWD/target/${2/==/-}
    [[ -d $other ]] || install_as_it_is --target "$other" "${@:2}"
    export PYTHONPATH=$other # before the environment's own
    set -- "${tests[@]}"
elif [[ $* == gate ]]; then
    set -- -m smoke tests/frameworks
elif (($# == 0)); then
    set -- tests/frameworks
fi
exec target/frameworks/bin/python -m pytest --quiet "$@"
