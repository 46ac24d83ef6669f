// Time prompts and decode steps of llama.cpp: node llama_cpp.mjs FOLDER MODEL.gguf THREADS [start]
//
// FOLDER contains node_modules/node-llama-cpp. The script reads lines with a prompt length and a number of tokens from the standard
// input, and prints the seconds until the first token and the seconds between the following tokens, like generation_peers.py --answer.
// With "start", it prints the times when the library was imported, when the model was loaded and when the first token came.
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads, mode] = process.argv.slice(2);
const entry = path.resolve(folder, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry));
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), progressLogs: false, logLevel: "error"});
const imported = Date.now() / 1e3;
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 4096, batchSize: 512, threads: Number(threads)});
const sequence = context.getSequence();
const loaded = Date.now() / 1e3;

async function run(prompt, count) {
    await sequence.clearHistory();
    const times = [performance.now()];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        times.push(performance.now());
        if (times.length > count) break;
    }
    const [first, ...rest] = times.slice(1).map((after, i) => (after - times[i]) / 1e3);
    return [first, rest];
}

await run(Array.from({length: 16}, (_, i) => 10 + i), mode === "start" ? 1 : 4);
if (mode === "start") {
    console.log(JSON.stringify([imported, loaded, Date.now() / 1e3]));
    process.exit(0);
}
console.log("ready");
for await (const line of readline.createInterface({input: process.stdin})) {
    const [length, count] = line.split(" ").map(Number);
    const prompt = Array.from({length}, (_, i) => 10 + ((37 * i) % 31_000));
    console.log(JSON.stringify(await run(prompt, count)));
}
process.exit(0);
