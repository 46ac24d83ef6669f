// The searchable table of docs/models.md. Its rows are in models.json, which `make sweep` writes.
(function () {
  const place = document.getElementById("models");
  if (!place) return;
  const script = document.currentScript;
  const element = (name, attributes, text) => {
    const made = Object.assign(document.createElement(name), attributes || {});
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const select = (label, options) => {
    const made = element("select", { ariaLabel: label });
    made.append(element("option", { value: "" }, label));
    for (const [value, text] of options) made.append(element("option", { value }, text));
    return made;
  };
  const passed = (text) => text !== "" && text !== "–" && !text.startsWith("[") && !text.startsWith("**");
  fetch(new URL("models.json", script.src)).then((answer) => answer.json()).then((data) => {
    const backends = [...new Set(data.columns.map((column) => column.split(" ")[0]))];
    const titles = { ORT: "ONNX Runtime", OV: "OpenVINO", GPU: "GPU" };
    const search = element("input", { type: "search", placeholder: "architecture", ariaLabel: "architecture" });
    const task = select("any task", [...new Set(data.rows.map((row) => row[1]))].sort().map((name) => [name, name]));
    const modality = select("any modality", Object.entries(data.modalities));
    const backend = select("any backend", backends.map((name) => [name, titles[name] || name]));
    const state = select("any result", [["all", "every stage passes"], ["some", "some stage is refused"]]);
    const count = element("p", { ariaLive: "polite" });
    const bar = element("div", { className: "models-bar" });
    bar.append(search, modality, task, backend, state);
    const table = element("table");
    const reasons = element("ol");
    data.reasons.forEach((text) => reasons.append(element("li", {}, text)));
    const details = element("details");
    details.append(element("summary", {}, "Reasons"), reasons);
    const holder = element("div", { className: "models-table" });
    holder.append(table);
    place.replaceChildren(bar, count, holder, details);
    const draw = () => {
      const shown = data.columns.map((column, i) => i).filter((i) => !backend.value || data.columns[i].split(" ")[0] === backend.value);
      const rows = data.rows.filter((row) => {
        const cells = shown.map((i) => row[3 + i]).filter((text) => text !== "" && text !== "–");
        const every = cells.length > 0 && cells.every(passed);
        return row[0].includes(search.value.trim().toLowerCase()) && (!task.value || row[1] === task.value) &&
          (!modality.value || row[2] === modality.value) && (!state.value || (state.value === "all") === every);
      });
      count.textContent = rows.length + " of " + data.rows.length + " pairs of an architecture and a task";
      const head = element("tr");
      ["architecture", "task", ...shown.map((i) => data.columns[i])].forEach((text) => head.append(element("th", { scope: "col" }, text)));
      const body = element("tbody");
      rows.forEach((row) => {
        const line = element("tr");
        line.append(element("td", {}, row[0]), element("td", {}, row[1]));
        shown.forEach((i) => {
          const text = row[3 + i].replaceAll("*", "");
          const reason = /^\[(\d+)\]$/.exec(text);
          line.append(element("td", reason ? { title: data.reasons[reason[1] - 1] } : {}, text));
        });
        body.append(line);
      });
      const top = element("thead");
      top.append(head);
      table.replaceChildren(top, body);
    };
    for (const control of [search, task, modality, backend, state]) control.addEventListener("input", draw);
    draw();
  });
})();
