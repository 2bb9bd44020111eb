"""The catalogue of causes: what it says of each beside its words."""

from __future__ import annotations

from typing import get_args

import pytest

from stayfinite.causes import CAUSES, Kind, cause_of

KINDS = {
    "data": "bad_input_data bad_label unnormalized_input",
    "precision": "grad_accumulation_overflow loss_scale_collapse loss_scale_overflow "
    "low_precision_overflow low_precision_underflow mask_value_overflow",
    "dynamics": "bad_lr_schedule exploding_recurrence gan_divergence loss_of_extreme_logits "
    "lr_too_high rl_value_divergence",
    "init": "bad_init uninitialized_memory",
}
TRAITS = {
    "provable": "acos_domain atan2_grad_at_zero ctc_infeasible division_by_zero empty_reduction "
    "log_of_negative log_of_zero low_precision_overflow mask_value_overflow norm_grad_at_zero "
    "optimizer_eps pow_grad_at_zero pow_of_negative softmax_all_masked sqrt_grad_at_zero "
    "sqrt_of_negative uninitialized_memory var_of_single weight_norm_of_zero "
    "zero_scale_distribution",
    "cured_by_float32": "low_precision_overflow low_precision_underflow mask_value_overflow",
    "cured_by_smaller_steps": "bad_init exploding_recurrence gan_divergence lr_too_high "
    "rl_value_divergence unnormalized_input",
    "due_to_history": "exploding_recurrence loss_of_extreme_logits lr_too_high unknown",
    "due_to_samples": "bad_input_data bad_label bn_stats_poisoned ctc_infeasible "
    "unnormalized_input",
}


# A cause that is new enters no table here: these are the ones that may not lose what they have.
@pytest.mark.parametrize("kind", KINDS)
def test_kind_decides_which_advice_fits(kind: str) -> None:
    found = {slug for slug, cause in CAUSES.items() if cause.kind == kind}
    assert set(KINDS[kind].split()) <= found
    others = " ".join(slugs for other, slugs in KINDS.items() if other != kind)
    assert found.isdisjoint(others.split())


@pytest.mark.parametrize("trait", TRAITS)
def test_trait_decides_what_is_tried(trait: str) -> None:
    found = {slug for slug, cause in CAUSES.items() if getattr(cause, trait)}
    assert set(TRAITS[trait].split()) <= found
    known = set(" ".join([*KINDS.values(), *TRAITS.values()]).split())
    assert found & known == set(TRAITS[trait].split())


def test_every_kind_is_known() -> None:
    assert {cause.kind for cause in CAUSES.values()} == set(get_args(Kind))


@pytest.mark.parametrize("slug", [None, "", "something_new"])
def test_nothing_is_said_of_a_cause_that_the_catalogue_lacks(slug: str | None) -> None:
    found = cause_of(slug)
    assert (found.slug, found.kind, found.provable) == (slug or "", "other", False)
    assert not found.due_to_history
