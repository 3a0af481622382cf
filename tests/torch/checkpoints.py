"""Saving and loading with torch.distributed.checkpoint, in every form that it has."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FORMS: dict[str, dict] = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "as they are": {},
}
"""Options of get_state_dict and set_state_dict; or model and optimizer are given to save and load as they are."""


def save(folder: str, net, opt, form: str) -> None:
    if form == "as they are":
        dcp.save({"model": net, "optim": opt}, checkpoint_id=folder)
        return
    model_state, optim_state = get_state_dict(net, opt, options=StateDictOptions(**FORMS[form]))
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)


def load(folder: str, net, opt, form: str) -> None:
    if form == "as they are":
        dcp.load({"model": net, "optim": opt}, checkpoint_id=folder)
        return
    options = StateDictOptions(**FORMS[form])
    model_state, optim_state = get_state_dict(net, opt, options=options)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
