"""The models that the tests run, as SGLang's `SGLANG_EXTERNAL_MODEL_PACKAGE`: with it SGLang does not import all of its
own at every start, which takes longer than a test."""
