"""The API of Hugging Face's Text Generation Inference (TGI), and MindIE's compatibility mode of it."""
