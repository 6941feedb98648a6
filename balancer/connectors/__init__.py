"""PD connectors: what each KV connector of vLLM needs on the two legs. One module each."""
