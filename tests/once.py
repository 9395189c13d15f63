"""Which tests run on the default version of JAX only (`-m "not once"` leaves them out): conftest.py marks them."""

from __future__ import annotations

from pathlib import Path

# Marked `once`: these test our own code, which does not change with JAX. Of a file that is listed with names, those
# tests run on every version: they ask JAX for something of its own, or are the one whole program of their kind. New
# files and whatever is not listed run on every version, too.
ONCE: dict[str, tuple[str, ...]] = {
    "benchmarks": (),
    "capture/test_inner_maps.py": (
        *(f"test_a_piece[{form}-True]" for form in ("roll", "own key", "dropout", "largest", "loop", "branch")),
        "test_a_piece_that_sends",
        "test_callbacks_are_called_by_each_replica",
        "test_on_an_explicit_mesh",
        "test_other_axes_and_other_generators_are_refused",
        "test_the_users_line_is_named",
    ),
    "checkpoint": (),
    "core": (),
    "machine": (),
    "planning/propagation/test_example_loops.py": ("test_replicas_go_on_together_where_the_body_mixes_examples",),
    "planning/propagation/test_loops.py": (
        *(
            f"test_a_step_for_the_whole_batch[{form}-8]"
            for form in (
                "layers_and_a_branch",
                "rnn_time_major",
                "over_scan_3_of_144",
                "over_fori_8_of_192",
                "steps_in_a_fori_loop",
                "steps_until_good_enough",
                "dynamic_loss_scale",
                "backtracking",
                "objective_by_switch",
            )
        ),
        *(
            f"test_a_step_for_one_replica[{form}-8]"
            for form in ("layers_remat", "with_dropout", "over_scan_8_of_192", "steps_in_a_scan", "skip_by_cond")
        ),
        "test_a_predicate_that_differs_between_replicas_that_communicate",
        "test_gradients_are_reduced_once_after_the_microbatches",
        "test_replicas_may_leave_a_loop_at_different_times",
    ),
    "planning/propagation/test_memo.py": (),
    "planning/propagation/test_microbatches.py": ("test_a_sum_that_can_tell_moves_them",),
    "planning/test_batch_choice.py": (
        "test_the_examples_are_found_without_a_hint",
        "test_whatever_is_chosen_the_numbers_are_those_of_jit[draws_in_a_loop]",
    ),
    "planning/test_buckets.py": (),
    "planning/test_costs.py": (),
    "planning/test_engines.py": (
        "test_same_numbers",
        "test_what_it_is_said_to_send_is_what_xla_sends",
        "test_what_xla_cannot_partition_is_refused",
    ),
    "planning/test_followers.py": (),
    "planning/test_plan.py": (
        "test_an_unknown_primitive_is_gathered_for_and_reported",
        "test_equations_of_a_library_inside_a_loop_have_the_users_line",
        "test_no_fallbacks_in_an_ordinary_step",
        "test_roles_are_found_inside_loops",
    ),
    "planning/test_precision.py": (),
    "planning/test_sliced.py": (
        *(
            f"test_numbers_are_those_of_the_plain_step[{form}-sharded-8]"
            for form in ("remat, residuals offloaded", "microbatches", "indexed", "nnx")
        ),
        "test_each_layer_is_gathered_and_scattered_inside_the_loop",
    ),
    "planning/test_torus_order.py": (),
    "planning/test_visits.py": (
        "test_few_examples_go_to_the_weights",
        "test_same_numbers_for_any_examples_on_any_replicas[8-16-sharded]",
    ),
    "planning/test_weights.py": ("test_each_weight_is_gathered_once_for_both_passes", "test_less_memory"),
    "runtime/test_call_cache.py": (),
    "runtime/test_collectives.py": (
        "test_each_replica_draws_only_its_slice_of_a_dropout_mask",
        "test_no_weight_is_transposed_to_be_split_along_an_inner_dimension",
        "test_scattered_and_gathered_along_any_dimension[bfloat16-1-True]",
        "test_the_plan_knows_the_all_reduce_programs_bytes[accumulation]",
        *(f"test_the_plan_predicts_every_collective[{form}]" for form in ("lamb-sharded", "accumulation-replicated")),
    ),
    "runtime/test_conversions.py": (),
    "runtime/test_fixed_order.py": ("test_the_numbers_are_the_steps_own", "test_where_the_order_cannot_be_kept"),
    "runtime/test_host_memory.py": (
        "test_memory_kinds_are_stable_and_nothing_is_compiled_again",
        "test_numbers_are_those_of_the_plain_step[padded-sharded]",
    ),
    "runtime/test_interrupts.py": (),
    "runtime/test_processes.py": (),
    "runtime/test_sharded_init.py": (
        "test_no_device_holds_the_optimizer_state_while_it_is_born",
        "test_state_is_born_where_it_rests[equinox-sharded]",
        "test_state_is_born_where_it_rests[flax-replicated]",
    ),
    "runtime/test_terms.py": (
        *(f"test_sums[{wire}-split(1)-their bits]" for wire in ("bfloat16", "int8")),
        "test_small_tensors_share_a_message",
        "test_what_is_not_finite_is_still_seen",
    ),
    "test_api.py": (
        "test_a_flax_train_state",
        "test_a_jitted_step_that_donates",
        "test_a_placed_state_that_holds_one_array_twice",
        "test_a_sharded_step_can_be_traced_itself",
        "test_an_explicit_mesh",
        "test_keyword_arguments",
        "test_lower_gives_what_jax_gives",
        "test_non_array_leaves_are_static",
        "test_numpy_arrays_and_python_scalars_as_arguments",
        "test_outputs_that_are_constants_or_inputs",
        "test_params_moments_batch_key",
        "test_placed_state_is_donated_and_placed_batches_are_not",
        "test_state_of_another_mesh_goes_in",
        "test_state_replicated_on_an_explicit_mesh",
        "test_the_callers_own_arrays_stay_alive_and_the_old_state_is_donated",
        "test_the_second_step_compiles_nothing",
        "test_the_static_arguments_of_a_jitted_step_need_no_repeating",
        "test_two_of_three_axes",
    ),
    "test_architecture.py": (),
    "test_docs.py": ("test_the_tutorial_trains",),
    "test_equality.py": (
        # what each program is traced to is read by every version's rules, and one of each kind is run
        "test_never_more_on_the_wire",
        "test_nothing_falls_back",
        *(
            f"test_same_numbers[{program}-8]"
            for program in (
                "transformer_bf16",
                "moe",
                "resnet",
                "lstm",
                "clip",
                "mixup",
                "recommender",
                "per_example_clip",
                "loss_scaling",
                "custom_derivatives",
                "graph_network",
                "ppo",
            )
        ),
        "test_two_data_axes[handwritten]",
        "test_weights_that_rest_sharded[steps_in_a_scan-8]",
    ),
    "test_examples.py": (),
    "test_fuzz.py": ("test_any_state_and_metrics", "test_equations_played_by_hand"),
    "test_imports.py": (),
    "test_keras.py": ("test_fit_evaluate_and_predict",),
    "test_matrix_optimizers.py": (
        "test_all_leaves_in_one_condition",
        "test_matrices_are_owned_and_the_numbers_are_those_of_jit",
        "test_several_steps_in_a_scan",
    ),
    "test_mutations.py": (),
    "test_nnx.py": (
        "test_a_step_that_mutates_model_optimizer_and_metrics",
        "test_split_and_merge_through_the_plain_shard",
    ),
    "test_once.py": (),
    "test_optimizers.py": tuple(
        f"test_same_numbers[{optimizer}]"
        for optimizer in ("adamw", "apply_if_finite", "flatten", "galore", "muon", "noise_then_adam")
    ),
    "test_padding.py": (
        "test_a_padded_leaf_copied_and_pickled",
        "test_a_padded_leaf_in_a_tree",
        "test_a_padded_leaf_is_its_logical_array",
        "test_any_shape_any_batch_any_replicas",
        "test_poison_is_seen_without_the_fill",
        *(f"test_uneven_batches[{model}-13-8]" for model in ("dropped_out", "recurrent", "convolved")),
    ),
    "test_public_names.py": (),
    "test_tpu.py": (),
    "test_uneven_axes.py": (),
    "tools/test_cli.py": (),
    "tools/test_explain.py": (),
    "tools/test_report.py": (),
    "tools/test_training.py": (),
}


def is_ours(path: Path, name: str) -> bool:
    here = Path(__file__).parent
    for place, everywhere in ONCE.items():
        if path.is_relative_to(here / place):
            return name not in everywhere and name.partition("[")[0] not in everywhere
    return False
