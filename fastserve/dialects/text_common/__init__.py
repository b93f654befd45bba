"""Parts that the text generation APIs (OpenAI's, TGI's, MindIE's and vLLM's) share."""
