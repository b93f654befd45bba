"""The text backend's model: transformers' code and weights on torch, with a cache of our own.

backend.py      the backend; imports torch when it is loaded
folder.py       what a Hugging Face style folder holds, and what of it is refused
loading.py      from a folder to an engine
memory.py       how many sequences of how many tokens fit
cache.py        keys and values, a row for each sequence
attention.py    what a step computes of a ragged batch
sentences.py    how a folder wants vectors made
encoder.py      models that make vectors, and write nothing
torch_model.py  plans in, logits out: the model of backends.text
fused.py        the forward of Llama and its relatives, written out
"""
