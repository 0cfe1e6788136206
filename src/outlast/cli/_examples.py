"""What each command's --help ends with: examples, and where to read on. Text only."""

from __future__ import annotations

__all__ = ["EXAMPLES", "epilog"]

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "demo": (
        ("outlast demo", "train a small GPT, kill things, compare the bits"),
        ("outlast demo --serve", "the same, with the page"),
        ("outlast demo --hosts 3", "on three hosts, made on this machine as root"),
    ),
    "plan": (
        ("outlast plan --profile llama3", "what a job of that kind meets"),
        ("outlast plan interval --mtbf-hours 50 --write-seconds 20", "when to checkpoint"),
        ("outlast plan --from-run outlast-runs", "plan on from what a run has seen"),
    ),
    "calibrate": (("outlast calibrate", "once on each kind of machine, before planning"),),
    "run": (
        ("outlast run --replicas 4 --spares 1 train.py --epochs 3", "what follows the script is the script's"),
        ("outlast run --replicas 4 --checkpoint-dir ckpt -m package.train", "a module; resumes where it ended"),
        ("outlast run --config run.toml train.py", "settings from a file; outlast config show explains them"),
        ("outlast run --endpoint 10.0.0.1:29400 --nnodes 3 --replicas 6 train.py", "on three hosts; see outlast agent"),
    ),
    "convert": (
        ("outlast convert train.py --processes 4", "what becomes of each line, and a diff"),
        ("outlast convert train.py --processes 4 --write", "change the file, where nothing is left to be done by hand"),
    ),
    "launch": (
        ("outlast launch slurm --nodes 3:4 --slots 8 --out job.sh train.py", "then: sbatch job.sh"),
        ("outlast launch kubernetes --nodes 3 --image registry/train:1 train.py", "then: kubectl apply -f"),
    ),
    "agent": (
        ("outlast agent --join 10.0.0.1:29400 --secret-file secret", "this host, with one replica"),
        ("OUTLAST_SECRET=... outlast agent --join head:29400 --slots 4", "with four; the secret from the environment"),
    ),
    "status": (
        ("outlast status", "the newest run under outlast-runs"),
        ("outlast status RUN --follow", "again and again, until it ends"),
        ("outlast status RUN --json | jq .step", "for programs"),
    ),
    "why": (
        ("outlast why", "the newest run: a paragraph to paste, then the evidence"),
        ("outlast why RUN --price '2.50 EUR' --accelerators 64", "with what it cost"),
    ),
    "watch": (("outlast watch RUN", "follow it; Ctrl-C ends the watching, never the run"),),
    "serve": (
        ("outlast serve RUN", "a page on loopback, and /metrics"),
        ("outlast serve RUN OTHER", "two runs side by side"),
        ("outlast serve RUN --actions", "with buttons to save and to stop, behind a key"),
    ),
    "export": (
        ("outlast export RUN --tensorboard tb --follow", "as long as the run lasts; tensorboard --logdir tb"),
        ("outlast export RUN --jsonl run.jsonl", "one object a line"),
        ("outlast export RUN --salvage saved", "what is readable of a damaged journal, for outlast why saved"),
    ),
    "save": (("outlast save RUN", "a checkpoint after the next step"),),
    "stop": (("outlast stop RUN --yes", "save, and stop in order"),),
    "scale": (
        ("outlast scale RUN --replicas 6", "two more, or two fewer, between two steps"),
        ("outlast scale --replicas 6 --join head:29400 --secret-file secret", "from another host"),
    ),
    "drain": (
        ("outlast drain node7 RUN", "its replicas go elsewhere, and none comes"),
        ("outlast drain node7 RUN --undo", "it may be used again"),
    ),
    "evict": (
        ("outlast evict r2 RUN", "another process in its place, between two steps"),
        ("outlast evict r2.1 RUN --now --json", "at once, by a signal that nothing withstands"),
    ),
    "doctor": (
        ("outlast doctor --quick --replicas 4", "this host, in a moment"),
        ("outlast doctor --model check.py:make", "does this model give the same bits twice?"),
        ("outlast doctor --answer 10.0.0.1:7799", "on one host; on another one:"),
        ("outlast doctor --quick --reach 10.0.0.1:7799", "what lies between the two"),
        ("outlast doctor --compare a.json --compare b.json", "do hosts agree?"),
    ),
    "prove": (
        ("outlast prove protocol --schedules 2000", "search for a schedule that breaks the protocol"),
        ("outlast prove faults --samples 12", "strike real fleets, compare the bits"),
        ("outlast prove run train.py --epochs 1", "your own script under faults"),
    ),
    "rules": (("outlast rules", "all rules, with how many liars each bears"),),
    "config": (("outlast config show --config run.toml", "every setting, and where its value came from"),),
    "health": (
        ("outlast health test --minutes 10", "ask a device what the answers are known to"),
        ("outlast health learn RUN", "add what a run tells to the diary of devices"),
    ),
    "ckpt": (
        ("outlast ckpt ls ckpt", "what is there"),
        ("outlast ckpt verify ckpt", "every byte"),
    ),
    "completion": (
        ('eval "$(outlast completion bash)"', "in ~/.bashrc; zsh likewise"),
        ("outlast completion fish > ~/.config/fish/completions/outlast.fish", "for fish"),
    ),
}
_MORE = {
    "plan collapse": ("--nodes 1000 --node-mtbf-hours 50000", "how long until the first of a thousand fails"),
    "plan sweep": ("--nodes 1000 --node-mtbf-hours 50000", "the best interval, beside Young's and Daly's"),
    "plan placement": ("--nodes 16 --copies 2 --losses 2", "two copies, and two machines at once"),
    "plan objectives": ("samples.csv --sla 0.99", "which objectives were met, which budgets are burning"),
    "plan quorum": ("--replicas 5 --availability 0.99", "which quorums serve, and how often"),
    "plan burn-in": ("--units 64 --days 3", "what three days of burn-in buy"),
    "plan price": ("--profile llama3 --price 2.5", "what lost work costs"),
    "plan lifetimes": ("units.csv --years 3", "a job on units that are three years old"),
    "plan month": ("outlast-runs --price 2.5", "useful time, failures and cost of a month"),
    "plan fleet": (
        "--nodes 1000 --node-mtbf-hours 50000",
        "how many are down at a time, and the spares that takes",
    ),
    "plan interval": ("--mtbf-hours 50 --write-seconds 20", "when to checkpoint"),
    "plan nines": ("--mtbf-hours 500 --mttr-hours 1 --target 0.999", "what the third nine takes"),
    "plan target-study": ("--replications 100", "the study, with less patience"),
    "plan job": ("--profile llama3 --accelerators 2048", "clocks, useful time, intervals, spares"),
    "plan prediction": ("--profile llama3 --share 0.5 --precision 0.7", "hours saved against false alarms"),
    "plan compare": ("a.toml b.toml", "which is better, and how long a run must be to show it"),
    "plan fit": ("failures.csv --preset slurm --plot fit.html", "what the log's failures follow"),
    "plan system": ("--params 70e9 --nodes 1000", "the three factors"),
    "launch slurm": ("--nodes 3:4 --slots 8 --out job.sh train.py", "then: sbatch job.sh"),
    "launch kubernetes": ("--nodes 3 --image registry/train:1 train.py", "then: kubectl apply -f"),
    "prove faults": ("--samples 12", "real fleets, struck at their phases"),
    "prove attacks": ("--attacks alie,ipm", "two lies, against one rule"),
    "prove strikes": ("--fleets 20 --resume strikes.jsonl", "stopped, it goes on with the same command"),
    "prove catalogue": ("--class omission", "who is silent, late or cut off"),
    "prove lost-weekend": ("--asleep 60", "nobody looks for sixty hours"),
    "prove run": ("--ranks 2 --minutes 15 --resume proof.jsonl train.py", "replicas of two processes, for a while"),
    "prove gate": ("--minutes 5 --junit proof.xml train.py", "for a build server"),
    "prove trace": ("--preset bamboo --hours 24 faults.csv train.py", "the busiest day of a log"),
    "prove protocol": ("--schedules 2000", "in virtual time: no processes, no torch"),
    "prove corruption": ("--flips 36 --audit 0.2", "who notices a flipped bit, and how fast"),
    "config show": ("--config run.toml", "every setting, and where its value came from"),
    "health ls": ("--json", "all devices that did something wrong"),
    "health show": ("GPU-1234", "what one did"),
    "health note": ("GPU-1234 'memory replaced' --repair", "a repair: what was before counts less"),
    "health retire": ("GPU-1234 --reason 'wrong products'", "it gets no replica any more"),
    "health learn": ("RUN", "add what a run tells to the diary"),
    "health test": ("--minutes 10", "ask a device what the answers are known to"),
    "health links": ("--run RUN", "judge links by a run's own exchanges"),
    "ckpt ls": ("ckpt", "what is there"),
    "ckpt show": ("ckpt --generation 7", "its tensors and the run's settings"),
    "ckpt verify": ("ckpt --all", "every byte of every generation"),
    "ckpt diff": ("ckpt@7 ckpt@9", "which tensors changed, and the settings"),
    "ckpt resume-check": ("--steps 8 --stop-at 4 train.py", "does it resume to the bit?"),
    "ckpt export": ("ckpt weights --names 'model.*' --strip-prefix model.", "weights that anybody can load"),
    "ckpt import": ("model.safetensors ckpt", "then: outlast run --init-from ckpt"),
    "ckpt prune": ("ckpt --keep-last 3 --dry-run", "what would go"),
}
EXAMPLES |= {name: ((f"outlast {name} {rest}", said),) for name, (rest, said) in _MORE.items()}


def epilog(name: str) -> str:
    """The end of `outlast NAME --help`, also of a command in a group."""
    rows = [f"  {line}\n      {said}" for line, said in EXAMPLES.get(name, ())]
    return "\b\n" + "\n".join(["Examples:", *rows]) if rows else ""
