"""The habits people have, and the test that holds each: alone it is what the fleets are compared with.

In fleets of two and of three one replica is killed from outside, its successor joins, and then the first ones are
killed. A name without a file is a habit of `../test_habits.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parent.parent

SAME_BITS = {
    "plain loop, LambdaLR, clipping, SDPA, dropout, tied weights, decay groups": "gpt",
    "bfloat16 autocast, activation checkpointing that is not reentrant": "gpt_in_bfloat16",
    "torch.compile of a function, whole, in place, with autocast": "compiled",
    "BatchNorm, drop path, workers, random augmentation, buffers counted in forward": "images",
    "SyncBatchNorm converted, channels last": "images_converted",
    "AdamW fused and foreach, Muon, a Lion of one's own": "optimizers",
    "LoRA by hand, frozen parameters": "lora",
    "LoRA of peft": "lora_of_peft",
    "a Function, hooks of gradients, modules and the optimizer, no gradient": "functions_and_hooks",
    "float64": "double",
    "bfloat16": "half",
    "Subset, random_split": "subset",
    "a sampler": "sampled",
    "sparse embedding, a batch left out": "sparse_and_skipped",
    "loops of epochs": "epochs",
    "the iterator in a variable or a bar": "in_a_bar",
    "Llama from its config, a collator": "language",
    "rates set in the loop": "rate_before rate_after rate_follows scheduler_by_hand",
    "ReduceLROnPlateau": "plateau_by_hand plateau_in_state plateau_of_ones_own",
    "schedule-free": "schedule_free",
    "averages of the weights": "average average_by_hook average_that_follows teacher average_in_the_model",
    "averages by hand that are registered, copies that are none": "average_by_hand_registered copies_kept",
    "a job of hydra, in a directory of its own": "under_hydra",
    "GAN as one sum, in turns with a penalty": "adversaries in_turns",
    "thawed in stages, groups": "thawed_in_stages frozen_then_thawed",
    "evaluation, early stopping, metrics": "evaluates stopped_by_one measured",
    "streams, by a loader": "streams streams_by_loader",
    "generators in the loop": "drawn_between drawn_from_ones_own",
    "what is read, or written, before the inner loop": "read_before_but_weights decayed_before",
}
NAMED = {
    "parameters that begin to train": "thawed group_added",
    "a counting optimizer, writes to .data": "counting_optimizer data_written",
    "averages that nobody was told of": "average_unregistered average_by_hand_late",
    "a dataset with a generator of its own": "drawing_dataset drawing_workers",
    "a dataset that keeps what it drew": "caching_dataset caching_workers",
    "clipping by hand, a scheduler stepped twice, a GradScaler by hand": "clipped_by_hand scheduler_twice scaled",
    "reentrant checkpointing, a tuple as a loss": "reentrant twice",
    "LBFGS, lazy layers, a DataLoader": "closure lazy loader",
}
ELSEWHERE = {
    "Accelerator.prepare, Fabric": "test_prepared.py::test_it_outlasts_a_death",
    "Hugging Face's Trainer": "test_trainers.py::test_a_llama_of_the_trainer_outlasts_its_replicas",
    "Lightning's Trainer": "test_lightning.py::test_a_lightning_module_outlasts_its_replicas",
    "a GradScaler given to protect; Inductor (two replicas)": "test_precision.py::test_fewer_bits_outlast_a_death",
    "torchrun": "test_torchrun.py::test_workers_of_one_host_are_as_many_replicas",
    "other launchers": "test_launching.py::test_processes_that_another_launcher_started_do_not_each_train_everything",
    "a script that changes its directory (one)":
        "test_launching.py::test_a_relative_directory_is_where_the_run_was_started_whatever_the_script_does",
    "a script edited while it runs": "test_launching.py::test_a_script_that_is_edited_while_it_runs_is_not_what_a_"
        "replacement_runs",
    "errors after the loop": "test_afterwards.py::test_the_writers_error_after_the_loop_is_the_runs",
    "resume on other counts": "test_checkpoints.py::test_killed_whole_and_resumed_at_another_replica_count",
    "Ctrl-C": "test_checkpoints.py::test_asked_to_stop_it_saves_first",
    "another run's checkpoints": "test_checkpoints.py::test_where_another_run_saves_nothing_is_trained",
    "other averages that nobody was told of":
        "habits/test_alone_and_off.py::test_an_average_is_named_in_the_first_steps",
    "what is no loss, step() and .grad in the loop":
        "habits/test_in_the_loop.py::test_whoever_uses_a_gradient_is_told_what_to_write",
}  # fmt: skip


def names(path: Path, *lists: str) -> set[str]:
    """The strings in the lists of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in lists:
            keys = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            found |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return found


def test_each_has_a_test_of_two_and_of_three() -> None:
    held = names(RUNTIME / "test_habits.py", "HELD", "HELD_TOO", "HELD_BESIDES", "BUILT", "OF_LIBRARIES")
    assert {name for told in SAME_BITS.values() for name in told.split()} <= held
    named = names(RUNTIME / "test_habits.py", "NAMED")
    assert {name for told in NAMED.values() for name in told.split()} <= named


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_other_files_hold_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    defined = {n.name for n in ast.walk(ast.parse((RUNTIME / path).read_text())) if isinstance(n, ast.FunctionDef)}
    assert name in defined
