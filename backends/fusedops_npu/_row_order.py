"""Why no kernel of torch_npu promises that a row has the same bits whatever the other rows are."""

#: Of the documents of torch_npu 2.13 none has such a sentence, and CANN cuts a call into tiles by its shape.
NOT_PROMISED = "torch_npu's documents do not promise it, and a call is cut into tiles by its shape"
