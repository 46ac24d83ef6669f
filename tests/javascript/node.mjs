// node node.mjs CASES.json: print a JSON object with the answers of every case, or the error.
import * as library from '@huggingface/transformers';
import fs from 'node:fs';
import { answer } from './answers.mjs';

const { root, cases } = JSON.parse(fs.readFileSync(process.argv[2]));
library.env.allowRemoteModels = false;
library.env.localModelPath = root;
const results = [];
for (const one of cases) {
  try {
    results.push(await answer(library, one, 'cpu'));
  } catch (error) {
    results.push({ error: String(error).slice(0, 500) });
  }
}
fs.writeFileSync(process.argv[3], JSON.stringify(results));
