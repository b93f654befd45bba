"""Continuous batching: many sequences in one batch, joining and leaving between any two steps. No framework
is known here; whatever computes logits for a plan of rows is a `Model`.

    submit -> Waiting -> Rows -> Plan -> Model.forward -> Sampler -> records
              priority   of the  tokens  one ragged       one call   finish,
              arrival    cache   of one  batch            a step     logprobs
                                 step

One step, with three sequences that write and one whose prompt is read in chunks:

    row of the cache     0   1   2 | 3
    tokens of the plan   t   t   t | p p p p p p     one of each that writes, then as much of prompts as fits
    logits wanted        x   x   x |           x     of a prompt's last token alone

Rows that write are packed in front, so that attention over them is a view of the cache, not a copy.
"""
