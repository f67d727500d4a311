# ironfn on NVIDIA's PyTorch image. The image's own torch is kept: it is built for the image's CUDA and NCCL.
#   docker build -t ironfn . && docker run --gpus all --ipc=host -v "$PWD:/runs" ironfn pretrain pretrain/quickstart
FROM nvcr.io/nvidia/pytorch:25.12-py3
WORKDIR /opt/ironfn
COPY pyproject.toml README.md LICENSE ./
COPY ironfn ironfn
COPY drivers drivers
COPY specs specs
# constraints.txt is not used here: it would replace the image's torch, which this line pins instead.
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > /tmp/torch.txt \
 && pip install --no-cache-dir -c /tmp/torch.txt ".[parquet,clean,plots,tensorboard]"
WORKDIR /runs
ENTRYPOINT ["ironfn"]
CMD ["--help"]
