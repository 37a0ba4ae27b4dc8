// Scores of search results: Sphinx's own, with pages of figures, reasons and experiments after those that tell how.

var Scorer = {
  score: ([docname, title, anchor, description, score]) =>
    /^(benchmarks\/|docs\/(decisions|log)\/|CHANGELOG)/.test(docname) ? score - 1000 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
