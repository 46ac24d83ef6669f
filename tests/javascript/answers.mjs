// Run the models of folders with transformers.js. Node and the browser import this file; both pass the library.

const dtypesByName = { int64: BigInt64Array, float32: Float32Array };

function tensors(library, feeds) {
  return Object.fromEntries(
    Object.entries(feeds).map(([name, { type, dims, data }]) => {
      const values = type === 'int64' ? BigInt64Array.from(data, BigInt) : dtypesByName[type].from(data);
      return [name, new library.Tensor(type, values, dims)];
    }),
  );
}

// Return the outputs and the generated tokens of one dtype of a model.
export async function answer(library, { folder, loader, dtype, feeds, outputs, generates, level }, device) {
  const model = await library[loader].from_pretrained(folder, {
    dtype,
    device,
    session_options: { graphOptimizationLevel: level },
  });
  const inputs = tensors(library, feeds);
  const result = await model(inputs);
  const answers = {};
  for (const name of outputs) {
    const tensor = result[name].to('float32');
    answers[name] = { dims: tensor.dims, data: Array.from(tensor.data) };
  }
  let tokens = null;
  if (generates) {
    const { decoder_input_ids: _, ...prompt } = inputs;
    const sequences = await model.generate({ ...prompt, max_new_tokens: 8, do_sample: false });
    tokens = sequences.tolist().map((row) => row.map(Number));
  }
  await model.dispose();
  return { answers, tokens };
}
