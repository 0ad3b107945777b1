#!/usr/bin/env bash
# Run gpu_host_info, gpu_preflight and nccl for real on this GPU host, through Ansible's local connection, and prove what they do:
# what NCCL says it took from the block, what its settings cost or bring, and that taking the block out restores the file.
#
#   tests/gpu/nccl_proof.sh FOLDER [PYTHON]
#
# Needs root (the interpreter's sitecustomize.py is written, and restored), ansible-playbook and jmespath in PATH, and PYTHON
# (default: python3) with torch for CUDA. FOLDER gets proof.json and what it is made of. With one GPU the all-reduce is left out.
# ROUNDS (default 5) runs of each setting are made, in turn. PREFLIGHT_VARS: extra variables of the preflight as JSON.
# Exit status: 0 proven, 1 something differs (proof.json says what), 2 wrong call.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,12p' "$0"; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=$(command -v "${2:-python3}")
root=$(cd "$(dirname "$0")/../.." && pwd)
rounds=${ROUNDS:-5}
cd "$root"
export ANSIBLE_CONFIG="$root/ansible.cfg" ANSIBLE_COLLECTIONS_PATH="$root/collections" ANSIBLE_NOCOLOR=1 LC_ALL=C.UTF-8
for name in NCCL_PROTO NCCL_ALGO NCCL_P2P_LEVEL NCCL_MAX_NCHANNELS NCCL_BUFFSIZE NCCL_NTHREADS; do
    [ -z "${!name:-}" ] || { echo "$name is set in this shell and would win over the block: unset it first" >&2; exit 2; }
done
work=$(mktemp -d)
mkdir -p "$out/runs" "$out/logs"
local=(-i "localhost," -c local -e ansible_become=false)

cat >"$work/nccl.yml" <<YAML
- hosts: localhost
  gather_facts: false
  roles: [gpuserve.sglang.nccl]
  post_tasks:
    - name: Keep the result
      ansible.builtin.copy:
        content: "{{ nccl_result | to_nice_json }}"
        dest: "{{ result_file }}"
        mode: "0644"
      check_mode: false
YAML

# nccl NAME [ARGUMENT...]: the role, its result as NAME.json
nccl() {
    local name=$1
    shift
    ansible-playbook "${local[@]}" "$work/nccl.yml" -e nccl_interpreter="$python" -e result_file="$work/$name.json" "$@" \
        >"$out/logs/$name.txt" 2>&1 || { tail -n 30 "$out/logs/$name.txt" >&2; return 1; }
}

# Whatever happens in between, the block does not stay.
cleanup() { nccl cleanup -e nccl_state=absent || true; rm -rf "$work"; }
trap cleanup EXIT

target() { "$python" -c 'import sitecustomize as s, os; print(os.path.realpath(s.__file__))' 2>/dev/null || true; }
state() {
    local file
    file=$(target)
    if [ -n "$file" ]; then printf '%s %s %s\n' "$file" "$(sha256sum <"$file" | cut -d' ' -f1)" "$(stat -c '%a %U %G' "$file")"; else echo none; fi
}

# --- the host ---------------------------------------------------------------------------------------------------------
ansible "${local[@]}" localhost -m gpuserve.sglang.gpu_host_info \
    -a "$("$python" -c 'import json,sys; print(json.dumps({"interpreters": sys.argv[1:], "paths": ["/opt"]}))' "$python")" \
    --tree "$work/host" >"$out/logs/gpu_host_info.txt" 2>&1
cp "$work/host/localhost" "$work/host.json"
gpus=$("$python" -c 'import json,sys; print(len(json.load(open(sys.argv[1]))["gpus"]))' "$work/host.json")

preflight=0
ansible-playbook "${local[@]}" playbooks/preflight.yml -e gpu_preflight_gpu_count="$gpus" \
    -e gpu_preflight_report_file="$work/preflight.json" \
    -e "{\"gpu_preflight_interpreters\": [\"$python\"]}" -e "${PREFLIGHT_VARS:-"{}"}" \
    >"$out/logs/preflight.txt" 2>&1 || preflight=$?

# --- the block --------------------------------------------------------------------------------------------------------
before=$(state)
nccl check --check -e nccl_topology=pcie
after_check=$(state)
for topology in auto pcie; do
    nccl "$topology" -e nccl_topology="$topology"
    nccl "$topology-again" -e nccl_topology="$topology"
done
for ((round = 1; round <= rounds && gpus >= 2; round++)); do
    # Each setting goes first in every other round: a host that gets warmer favours neither.
    order=(auto pcie)
    ((round % 2)) || order=(pcie auto)
    for topology in "${order[@]}"; do
        nccl toggle -e nccl_topology="$topology"
        "$python" tests/gpu/allreduce_ab.py measure --label "$topology" >"$out/runs/$round-$topology.json" || break 2
    done
done
nccl absent -e nccl_state=absent
after=$(state)
nccl absent-again -e nccl_state=absent

# --- the proof --------------------------------------------------------------------------------------------------------
"$python" tests/gpu/allreduce_ab.py compare "$out/runs" >"$work/compared.json" || true
BEFORE=$before AFTER_CHECK=$after_check AFTER=$after PREFLIGHT=$preflight "$python" - "$work" >"$out/proof.json" <<'PYTHON'
import datetime, json, os, pathlib, sys

work = pathlib.Path(sys.argv[1])
read = lambda name: json.loads((work / f"{name}.json").read_text()) if (work / f"{name}.json").exists() else None
host, report, compared = read("host"), read("preflight"), read("compared")
results = {name: read(name) for name in ("check", "auto", "auto-again", "pcie", "pcie-again", "absent", "absent-again")}
env = os.environ
topology = host["links"]["topology"]
pcie = {name: value for name, value in results["pcie"]["environment"].items() if name in results["pcie"]["block"]}
nccl_only = {name: value for name, value in pcie.items() if name.startswith("NCCL_")}
wanted = {name for name in nccl_only}
claims = {
    "gpu_host_info found GPUs and their links": bool(host["gpus"]) and topology in ("pcie", "nvlink", "none"),
    "gpu_preflight gave a report, and its exit status agrees": report is not None
    and int(env["PREFLIGHT"]) == (0 if report["ok"] else 2),
    "check mode predicted the change and wrote nothing": results["check"]["changed"] and env["AFTER_CHECK"] == env["BEFORE"],
    "the first run changed the file": results["auto"]["changed"] and results["pcie"]["changed"],
    "the second run changed nothing": not any(results[f"{n}-again"]["changed"] for n in ("auto", "pcie", "absent")),
    "six NCCL variables on PCIe": len(wanted) == 6,
    "none of them on NVLink": topology != "nvlink" or not any(name in results["auto"]["block"] for name in wanted),
    "absent restored the file byte for byte": results["absent"]["changed"] and env["AFTER"] == env["BEFORE"],
}
if len(host["gpus"]) >= 2:
    claims["every all-reduce came to its end"] = compared["status"] == "ok"
if compared["status"] == "ok":
    took = compared["nccl_took"]
    claims["NCCL's own log names every variable of the block"] = {n: took["pcie"].get(n) for n in wanted} == nccl_only
    claims["and none of them without it"] = topology != "nvlink" or not wanted & set(took["auto"])
proof = {
    "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    "host": {
        "gpus": [gpu["name"] for gpu in host["gpus"]],
        "topology": topology,
        "matrix": host["links"]["matrix"],
        "driver": {key: host["driver"][key] for key in ("loaded", "installed", "flavour", "source")},
        "toolkits": host["toolkits"],
        "os": host["os"]["pretty_name"],
        "init_system": host["init_system"],
        "python": host["sitecustomize"][0]["version"],
        "notes": host["notes"],
    },
    "preflight": {
        "exit_status": int(env["PREFLIGHT"]),
        **{key: [{k: e[k] for k in ("id", "message", "reason") if k in e} for e in report[key]]
           for key in ("failures", "warnings", "waived")},
        "passed": report["passed"],
        "skipped": report["skipped"],
    },
    "sitecustomize": {
        "before": env["BEFORE"],
        "after": env["AFTER"],
        "changed": {name: result["changed"] for name, result in results.items()},
        "environment": {"auto": results["auto"]["environment"], "pcie": results["pcie"]["environment"]},
    },
    "allreduce": compared,
    "claims": claims,
    "proven": all(claims.values()),
}
print(json.dumps(proof, indent=1))
PYTHON
"$python" -c '
import json, sys
proof = json.load(open(sys.argv[1]))
for claim, holds in proof["claims"].items():
    print("ok  " if holds else "NOT ", claim)
print("all-reduce:", proof["allreduce"]["status"], proof["allreduce"].get("message", ""))
sys.exit(0 if proof["proven"] else 1)' "$out/proof.json"
